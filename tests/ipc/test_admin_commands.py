"""`octavo admin` against the socket of a core, over workers without a model."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from core_client import CoreUnderTest, SocketClient, running_core

from octavo.frontend.cli.admin import engine_calls
from octavo.frontend.cli.main import main
from octavo.protocol.events import Failed, FailureKind, Finished, FinishReason

PROMPT = [1, 2, 3, 4, 5]
MANY_TOKENS = 480
"""More than the slow workers of these tests compute before a test ends."""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoreUnderTest]:
    with running_core(tmp_path_factory.mktemp("octavo-admin"), "slow", max_model_len=512) as running:
        yield running


@pytest.fixture
def client(core: CoreUnderTest) -> Iterator[SocketClient]:
    with SocketClient(core.address) as connected:
        connected.connect()
        yield connected


def admin(core: CoreUnderTest, *arguments: str) -> int:
    return main(["admin", *arguments, "--address", core.address])


def start(client: SocketClient, *request_ids: str) -> None:
    for request_id in request_ids:
        client.submit(request_id, PROMPT, MANY_TOKENS)
        client.receive_until(lambda event, request_id=request_id: bool(client.token_ids(request_id)))


def reason(client: SocketClient, request_id: str) -> FinishReason:
    client.finish(request_id)
    end = client.request_events(request_id)[-1]
    assert isinstance(end, Finished)
    return end.reason


def test_requests_of_other_frontends_are_listed_and_aborted(
    core: CoreUnderTest, client: SocketClient, capsys: pytest.CaptureFixture[str]
) -> None:
    start(client, "a", "b", "c")
    assert admin(core, "list") == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["REQUEST", "STATE", "PROMPT"]
    assert sorted(row.split()[:3] for row in rows) == [[name, "running", "5"] for name in "abc"]
    assert admin(core, "list", "--limit", "1") == 0
    assert "... and 2 more" in capsys.readouterr().out
    assert admin(core, "abort", "b", "unknown") == 0
    assert capsys.readouterr().out == "aborted 1 requests\n"
    assert reason(client, "b") is FinishReason.ABORT
    assert admin(core, "abort", "b") == 1
    assert "no such request is live" in capsys.readouterr().err
    assert admin(core, "reset-caches") == 1
    assert "in use by running requests" in capsys.readouterr().err
    assert admin(core, "abort", "--all") == 0
    assert {reason(client, "a"), reason(client, "c")} == {FinishReason.ABORT}
    assert admin(core, "reset-caches") == 0


def test_a_drained_engine_finishes_what_it_has_and_rejects_what_comes(
    core: CoreUnderTest, client: SocketClient, capsys: pytest.CaptureFixture[str]
) -> None:
    start(client, "early")
    assert admin(core, "drain") == 0
    client.submit("late", PROMPT)
    client.finish("late")
    (end,) = client.request_events("late")
    assert isinstance(end, Failed) and end.kind is FailureKind.OVERLOADED and "drains" in end.message
    assert admin(core, "drain", "--wait", "--timeout", "0") == 1
    assert "1 requests are left" in capsys.readouterr().err
    assert admin(core, "state") == 0
    assert "draining" in capsys.readouterr().out
    assert admin(core, "abort", "early") == 0
    assert reason(client, "early") is FinishReason.ABORT
    assert admin(core, "drain", "--wait") == 0
    assert admin(core, "resume") == 0
    client.submit("again", PROMPT)
    client.finish("again")
    assert isinstance(client.request_events("again")[-1], Finished)


def test_state_and_log_level(core: CoreUnderTest, capsys: pytest.CaptureFixture[str]) -> None:
    assert admin(core, "state", "--json") == 0
    state = json.loads(capsys.readouterr().out)
    assert state["address"] == core.address and not state["is_draining"]
    assert state["stats"]["num_blocks"] > 0 and state["weights"]["version"] == 0
    assert admin(core, "log-level", "debug") == 0
    assert capsys.readouterr().out == "the log level is DEBUG\n"
    with pytest.raises(SystemExit):
        admin(core, "log-level", "LOUD")


def test_the_only_engine_of_a_user_is_found(
    core: CoreUnderTest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["admin", "state"]) == 1
    assert "--address" in capsys.readouterr().err
    socket = Path(core.address.removeprefix("ipc://"))
    for name in ("octavo-1", "octavo-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "core").symlink_to(socket)
    assert main(["admin", "state"]) == 0, "two names of one socket are one engine"
    assert "serving" in capsys.readouterr().out
    monkeypatch.setattr(Path, "resolve", lambda path: path)  # as if they were two
    assert main(["admin", "drain"]) == 1
    assert "runs 2 engines" in capsys.readouterr().err


def test_an_address_without_engine_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_calls, "TIMEOUT_S", 0.2)
    assert main(["admin", "list", "--address", f"ipc://{tmp_path}/none"]) == 1
    assert "no engine answers" in capsys.readouterr().err
