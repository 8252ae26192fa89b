"""`octavo chat` and `octavo complete` on a terminal and in a pipe, against the real server without an engine."""

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest
import warm_python
from fake_client import FakeClient
from fake_server import fake_server
from waiting import wait_until

from octavo.frontend.cli import main
from octavo.frontend.cli.api import Api
from octavo.frontend.cli.errors import CommandError
from octavo.protocol.errors import RequestFailedError


@pytest.fixture
def client() -> FakeClient:
    return FakeClient("Hello!")


def octavo(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return warm_python.run(["-m", "octavo", *words], input=stdin, timeout=60)


def heed_ctrl_c() -> None:
    """Undo what a shell does to programs that it starts in the background, tests among them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def at_a_terminal() -> None:
    """Make standard input the terminal from which Ctrl-C comes."""
    heed_ctrl_c()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_input_must_be_text_and_output_may_be_poor(command: str, client: FakeClient) -> None:
    words = [sys.executable, "-P", "-m", "octavo", command, "--url"]
    poor = os.environ | {"PYTHONIOENCODING": "ascii"}
    with fake_server(FakeClient("Grüße")) as url:
        done = subprocess.run([*words, url], input=b"\xff\n", capture_output=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (1, b"") and b"not UTF-8" in done.stderr
        done = subprocess.run([*words, url, "-q", "hi"], capture_output=True, timeout=60, check=False, env=poor)
        assert done.returncode == 0 and done.stdout.startswith(b"Gr??") and not done.stderr


def prompt_text(client: FakeClient, number: int = -1) -> str:
    text: str = client.requests[number]["prompt"]["prompt"]
    return text


def test_quick_message_prints_the_answer_alone(client: FakeClient) -> None:
    with fake_server(client) as url:
        words = [
            "--max-tokens",
            "5",
            "--temperature",
            "0.5",
            "--seed",
            "7",
            "--stop",
            "x",
            "--system-prompt",
            "Be kind.",
        ]
        done = octavo("chat", "--url", url, "-q", "hi", *words)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello\n", "")
    assert prompt_text(client) == "<system>Be kind.<user>hi<assistant>"
    params = client.requests[0]["params"]
    assert (params.max_tokens, params.temperature, params.seed, params.stop) == (5, 0.5, 7, ["x"])


def test_every_piped_line_is_a_message_of_one_conversation(client: FakeClient) -> None:
    with fake_server(client) as url:
        done = octavo("chat", "--url", url, "--stats", stdin="one\n\ntwo\n")
    assert done.stdout == "Hello!\nHello!\n"
    assert prompt_text(client, 1) == "<user>one<assistant>Hello!<user>two<assistant>"
    lines = done.stderr.splitlines()
    assert len(lines) == 2 and all(line.startswith("[6 tokens, first text after ") for line in lines)


def test_quick_message_from_standard_input_may_have_lines(client: FakeClient) -> None:
    with fake_server(client) as url:
        octavo("chat", "--url", url, "-q", "-", stdin="one\ntwo\n")
    assert prompt_text(client) == "<user>one\ntwo\n<assistant>"


def test_complete_goes_on_with_standard_input(client: FakeClient) -> None:
    with fake_server(client) as url:
        done = octavo("complete", "--url", url, "--max-tokens", "4", stdin="Once upon\na time")
        echoed = octavo("complete", "--url", url + "/v1" if url.startswith("http") else url, "--echo", "-q", "Say: ")
    assert done.stdout == "Hell\n"
    assert prompt_text(client, 0) == "Once upon\na time"
    assert echoed.stdout == "Say: Hello!\n"


def test_extra_fields_go_with_the_request(client: FakeClient) -> None:
    with fake_server(client) as url:
        assert octavo("complete", "--url", url, "-q", "a", "--extra-body", '{"min_p": 0.25}').returncode == 0
        wrong = octavo("complete", "--url", url, "-q", "a", "--extra-body", "[1]")
    assert client.requests[0]["params"].min_p == 0.25
    assert wrong.returncode == 2 and "must be a JSON object" in wrong.stderr


def test_no_server_is_one_line_with_the_remedy(capsys) -> None:
    assert main(["chat", "--url", "unix:/nowhere/socket", "-q", "hi"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("octavo: error: no server answers at unix:/nowhere/socket: No such file")
    assert "octavo serve MODEL" in line and "--url" in line


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "http://", "unix:", "http://a:99999"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(CommandError, match="is not the address of a server"):
        Api(url)


def test_rejections_are_told_in_the_servers_words(client: FakeClient, capsys) -> None:
    with fake_server(client, ["secret"]) as url:
        assert main(["chat", "--url", url, "-q", "hi"]) == 1
        assert "answers 401" in (line := capsys.readouterr().err) and "--api-key" in line
        assert main(["chat", "--url", url, "-q", "hi", "--api-key", "secret", "--model-name", "gpt-9"]) == 1
        assert "answers 404: the model 'gpt-9' is not served here" in capsys.readouterr().err
        assert main(["chat", "--url", url, "-q", "hi", "--api-key", "secret"]) == 0


def test_failure_in_the_middle_of_an_answer(client: FakeClient, capsys) -> None:
    client.error, client.error_after = RequestFailedError("the step failed"), 2
    with fake_server(client) as url:
        assert main(["chat", "--url", url, "-q", "hi"]) == 1
    out, error = capsys.readouterr()
    assert out == "He\n" and error.strip().endswith("the step failed")


def test_ctrl_c_in_a_pipe_ends_the_request_and_the_program(client: FakeClient) -> None:
    client.pause_after = 2
    with fake_server(client) as url:
        command = [sys.executable, "-P", "-m", "octavo", "chat", "--url", url, "-q", "hi"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c) as process:
            try:
                assert process.stdout is not None and process.stdout.read(2) == "He"
                process.send_signal(signal.SIGINT)
                assert process.wait(30) == 130
            finally:
                process.kill()
        wait_until(lambda: client.ended_early)


def test_reader_that_leaves_early_is_no_traceback(client: FakeClient) -> None:
    with fake_server(client) as url:
        command = f"yes question | {sys.executable} -P -m octavo chat --url {url} | head -n 1"
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("Hello!\n", "")


class Terminal:
    """A program that believes a person sits in front of it."""

    def __init__(self, *words: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "octavo", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=at_a_terminal,
        )
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def read_until(self, text: str) -> str:
        """Return what appeared up to and with a text."""
        deadline = time.monotonic() + 30
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            with contextlib.suppress(OSError):
                self.seen += os.read(self.master, 4096).decode()
        before, _, self.seen = self.seen.partition(text)
        return before + text


@contextlib.contextmanager
def terminal(*words: str) -> Iterator[Terminal]:
    screen = Terminal(*words)
    try:
        yield screen
    finally:
        screen.process.kill()
        screen.process.wait()
        os.close(screen.master)


def test_conversation_at_a_terminal(client: FakeClient) -> None:
    client.pause_after = 3
    with fake_server(client) as url, terminal("chat", "--url", url) as screen:
        screen.read_until("> ")
        screen.type("hi \\\n")
        screen.read_until(". ")
        screen.type("there\n")
        screen.read_until("Hel")
        screen.type("\x03")
        wait_until(lambda: client.ended_early)
        screen.read_until("> ")
        screen.type("\x03")
        screen.read_until("(Ctrl-D exits)")
        screen.read_until("> ")
        client.pause_after = None
        screen.type("again\n")
        screen.read_until("Hello!")
        screen.read_until("> ")
        screen.type("/retry\n")
        screen.read_until("Hello!")
        screen.read_until("> ")
        screen.type("/clear\n")
        screen.read_until("> ")
        screen.type("new\n")
        screen.read_until("Hello!")
        screen.read_until("> ")
        screen.type("\x04")
        assert screen.process.wait(30) == 0
    texts = [request["prompt"]["prompt"] for request in client.requests]
    assert texts == [
        "<user>hi \nthere<assistant>",
        "<user>hi \nthere<assistant>Hel<user>again<assistant>",
        "<user>hi \nthere<assistant>Hel<user>again<assistant>",
        "<user>new<assistant>",
    ]


def test_rejected_question_does_not_end_the_conversation(client: FakeClient) -> None:
    with fake_server(client) as url, terminal("chat", "--url", url) as screen:
        screen.read_until("> ")
        screen.type("x" * 300 + "\n")
        screen.read_until("error: ")
        screen.read_until("> ")
        screen.type("short\n")
        screen.read_until("Hello!")
    assert prompt_text(client) == "<user>short<assistant>"


def test_text_of_a_model_cannot_command_the_terminal() -> None:
    client = FakeClient("a\x1b[2Jb")
    with fake_server(client) as url:
        with terminal("chat", "--url", url, "-q", "hi") as screen:
            assert "\x1b[2J" not in screen.read_until("b")
        assert octavo("chat", "--url", url, "-q", "hi").stdout == "a\x1b[2Jb\n"
