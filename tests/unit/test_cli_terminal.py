"""How an answer is shown, event by event; whole conversations are in tests/e2e/test_cli_chat.py."""

import sys
from collections.abc import Generator
from typing import Any

import pytest

from octavo.frontend.cli.api import Api
from octavo.frontend.cli.chat import _pieces
from octavo.frontend.cli.errors import CommandError
from octavo.frontend.cli.terminal import Answer, show


def events(*deltas: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
    for delta in deltas:
        yield {"choices": [{"delta": delta}]}
    yield {"choices": [], "usage": {"completion_tokens": len(deltas)}}


DELTAS = ({"role": "assistant", "content": ""}, {"reasoning": "Hm."}, {"reasoning_content": " Yes."}, {"content": "42"})


def test_pipe_gets_the_answer_without_the_reasoning(capsys: pytest.CaptureFixture[str]) -> None:
    answer = show(events(*DELTAS), _pieces)
    assert capsys.readouterr().out == "42\n"
    assert (answer.text, answer.num_tokens, answer.is_interrupted) == ("42", 4, False)


def test_terminal_shows_reasoning_dim(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert show(events(*DELTAS), _pieces).text == "42"
    assert capsys.readouterr().out == "\033[2mHm. Yes.\033[0m\n42\n"
    show(events({"reasoning": "cut"}), _pieces)
    assert capsys.readouterr().out == "\033[2mcut\033[0m\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_answer_is_one_line_at_least(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    show(events(), _pieces)
    show(events({"content": "a\n"}), _pieces)
    assert capsys.readouterr().out == "\na\n"


@pytest.mark.parametrize(("texts", "shown"), [([], ""), (["par"], "par\n")])
def test_a_request_rejected_at_its_start_prints_no_line(
    texts: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Generator[dict[str, Any], None, None]:
        yield from ({"choices": [{"delta": {"content": text}}]} for text in texts)
        raise CommandError("refused")

    with pytest.raises(CommandError):
        show(broken(), _pieces)
    assert capsys.readouterr().out == shown


def test_interrupted_answer_keeps_what_came(capsys: pytest.CaptureFixture[str]) -> None:
    closed = []

    def broken() -> Generator[dict[str, Any], None, None]:
        try:
            yield {"choices": [{"delta": {"content": "par"}}]}
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    answer = show(broken(), _pieces)
    assert (answer.text, answer.is_interrupted, closed) == ("par", True, [True])


def test_stats_say_what_is_known() -> None:
    answer = Answer(started=1.0, first=1.5, finished=3.0, num_tokens=10)
    assert answer.render_stats() == "[10 tokens, first text after 0.50 s, all after 2.00 s, 5.0 tokens/s]"
    answer.num_tokens = None
    assert answer.render_stats() == "[first text after 0.50 s, all after 2.00 s]"
    assert Answer(started=1.0, finished=2.0).render_stats() == "[no text, 1.00 s]"


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_address_is_right_with_and_without_v1(url: str) -> None:
    assert Api(url)._root == ""
    assert Api("https://h/octavo/v1")._root == "/octavo"


def test_address_may_not_be_a_place_without_host() -> None:
    with pytest.raises(CommandError, match="not the address of a server"):
        Api("/v1")
