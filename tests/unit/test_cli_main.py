"""The command line: help, suggestions, error messages, exit codes."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from source_tree import ROOT

from octavo.frontend.cli import main
from octavo.frontend.cli.config_docs import render_config_docs
from octavo.frontend.cli.main import COMMANDS
from octavo.frontend.cli.serve import engine_now, read_settings
from octavo.frontend.metrics.names import render_metrics_docs
from octavo.protocol.config.sources import engine_config, engine_fields, server_config, server_fields
from octavo.protocol.errors import ConfigError, EngineDeadError, StartupError


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """`octavo serve` sets the log of the whole process up; put it back."""
    logger = logging.getLogger("octavo")
    before = (logger.handlers[:], logger.propagate, logger.level)
    yield
    logger.handlers[:], logger.propagate = before[:2]
    logger.setLevel(before[2])


def test_help_names_every_command(capsys) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command.name in text for command in COMMANDS)


def test_version(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("octavo 0.")


def test_nothing_to_do_is_a_usage_error() -> None:
    assert main([]) == 2


def test_unknown_command(capsys) -> None:
    assert main(["sevre"]) == 2
    assert "unknown command 'sevre'" in capsys.readouterr().err


def test_serve_help_explains_every_setting(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["serve", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for info in (*engine_fields(), *server_fields()):
        assert f"{info.flag} " in text or f"{info.flag}," in text, info.flag
        assert info.description, info.name


def leaves(commands=COMMANDS, path=()):
    """Yield the words of every command that runs something."""
    for command in commands:
        if command.commands:
            yield from leaves(command.commands, (*path, command.name))
        else:
            yield [*path, command.name]


@pytest.mark.parametrize("words", [[], ["bench"], *leaves()], ids=" ".join)
def test_help_loads_nothing_heavy(words) -> None:
    words = [*words, "--help"]
    code = (
        "import sys\nfrom octavo.frontend.cli import main\n"
        f"try: main({words})\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'transformers', 'tokenizers', 'fastapi', 'pydantic', 'asyncio', 'yaml'}\n"
        "print('LOADED', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"
    assert done.stdout.startswith(f"usage: octavo {' '.join(words[:-1])}".rstrip())


def test_every_command_is_explained_and_has_a_parser() -> None:
    for words in leaves():
        commands = COMMANDS
        for word in words:
            command = next(command for command in commands if command.name == word)
            commands = command.commands
        assert command.help
        parser = import_module(command.module).parser()
        assert parser.prog == " ".join(["octavo", *words])
        for action in parser._actions:
            assert action.help, f"{parser.prog} {action.option_strings}"


def help_on(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(list(words))
    assert stopped.value.code == 0
    return capsys.readouterr().out


def test_help_on_a_group_shows_nothing_else(capsys) -> None:
    text = help_on(capsys, "serve", "--help=cache")
    assert "--block-size" in text and "--max-num-seqs" not in text
    groups = help_on(capsys, "serve", "--help=groups")
    assert groups == help_on(capsys, "serve", "--help=listgroup")
    assert help_on(capsys, "serve", "--help=all") == help_on(capsys, "serve", "--help")
    assert "  cache  " in groups and "  server  " in groups and "--" not in groups.partition(":")[2]


@pytest.mark.parametrize("word", ["prefix", "--enable-prefix-caching", "enable_prefix_caching"])
def test_help_on_a_word_shows_the_flags_that_have_it(word, capsys) -> None:
    text = help_on(capsys, "serve", f"--help={word}")
    assert "--enable-prefix-caching" in text and "--block-size" not in text


def test_help_on_an_unknown_word(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["serve", "--help=schedular"])
    assert stopped.value.code == 2
    assert "did you mean scheduler?" in capsys.readouterr().err


def test_commands_below_commands(capsys) -> None:
    assert main(["bench", "--help"]) == 0
    assert "throughput" in capsys.readouterr().out
    assert main(["bench"]) == 2
    assert main(["bench", "thruput"]) == 2
    assert "did you mean throughput?" in capsys.readouterr().err
    assert main(["sevre"]) == 2
    assert "did you mean serve?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["m", "--max-num-seq", "3"], "did you mean --max-num-seqs?"),
        (["m", "--max-num-seq=3"], "did you mean --max-num-seqs?"),
        (["m", "--port", "abc"], "argument --port: not a size: 'abc'"),
        (["m", "--qqqqqqqqqq"], "unknown flag --qqqqqqqqqq"),
        (["m", "other"], "unexpected argument 'other'"),
        (["m", "--model", "other"], "two models are named"),
        ([], "which model?"),
        (["m", "--port", "many"], "--port"),
        (["m", "--dtype", "int3"], "--dtype"),
    ],
    ids=str,
)
def test_wrong_arguments_print_one_line_and_exit_with_code_2(words, complaint, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["serve", *words])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line


def test_flags_become_settings() -> None:
    words = "m --max-model-len 32k --kv-cache-memory-bytes 1.5G --no-enable-prefix-caching --served-model-name a b"
    words += " --served-model-name c --api-key k --gpu-memory-utilization 0.5 --max-logprobs -1 --uds /tmp/s"
    assert read_settings(words.split()) == {
        "model": "m",
        "max_model_len": 32_000,
        "kv_cache_memory_bytes": 3 * 2**29,
        "enable_prefix_caching": False,
        "served_model_name": ["a", "b", "c"],
        "api_key": ["k"],
        "gpu_memory_utilization": 0.5,
        "max_logprobs": -1,
        "uds": "/tmp/s",
    }
    assert read_settings(["--model=m", "--max-model-len=auto"]) == {"model": "m", "max_model_len": "auto"}


def test_command_line_wins_over_the_file(tmp_path) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text("model: m\nmax-model-len: 4K\nmax_num_seqs: 8\nport: 9\nserved-model-name: one\n")
    settings = read_settings(["--config", str(file), "--max-num-seqs", "2"])
    assert settings == {
        "model": "m",
        "max_model_len": 4096,
        "max_num_seqs": 2,
        "port": 9,
        "served_model_name": ["one"],
    }
    names = {info.name for info in server_fields()}
    assert engine_config({k: v for k, v in settings.items() if k not in names}).scheduler.max_num_seqs == 2
    assert server_config({k: v for k, v in settings.items() if k in names}).port == 9


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("max-num-seq: 3", "unknown setting 'max-num-seq'", "did you mean max-num-seqs?"),
        ("max-model-len: long", "max-model-len: not a size: 'long'", ""),
        ("- a\n- b", "must hold settings", ""),
        ("a: [", "is not YAML", ""),
    ],
    ids=str,
)
def test_wrong_files(tmp_path, text, message, hint) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_settings(["m", "--config", str(file)])
    assert str(file) in raised.value.message and message in raised.value.message
    assert raised.value.hint == hint


def test_missing_file_is_the_last_line(capsys) -> None:
    assert main(["serve", "m", "--config", "/nowhere/octavo.yaml"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("octavo: error: cannot read /nowhere/octavo.yaml")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (StartupError("no room", hint="use --max-model-len 8k", details="a\nb"), "no room (use --max-model-len 8k)"),
        (EngineDeadError("the core was killed by SIGKILL"), "the core was killed by SIGKILL"),
    ],
    ids=str,
)
def test_root_cause_is_the_last_line(error, line, capsys, monkeypatch) -> None:
    def fails(config: object, timeline: object) -> None:
        raise error

    monkeypatch.setattr("octavo.frontend.cli.serve.read_config", fails)
    assert main(["serve", "m", "--port", "0", "--log-level", "error"]) == 1
    assert capsys.readouterr().err.splitlines() == [f"octavo: error: {line}"]


def test_details_are_shown_at_debug_level_only(capsys, monkeypatch) -> None:
    def fails(config: object, timeline: object) -> None:
        raise StartupError("no room", details="Traceback ...")

    monkeypatch.setattr("octavo.frontend.cli.serve.read_config", fails)
    assert main(["serve", "m", "--port", "0", "--log-level", "debug"]) == 1
    assert capsys.readouterr().err.splitlines() == ["Traceback ...", "octavo: error: no room"]


def test_taken_port_is_said_before_anything_is_loaded(capsys, free_port) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        assert main(["serve", "/nowhere", "--port", str(free_port)]) == 1
    assert f"127.0.0.1:{free_port} is in use" in capsys.readouterr().err.splitlines()[-1]


def test_values_out_of_bounds_name_their_setting(capsys) -> None:
    assert main(["serve", "m", "--block-size", "1000"]) == 1
    assert "block_size" in capsys.readouterr().err.splitlines()[-1]
    assert main(["serve", "m", "--log-level", "loud"]) == 1
    assert "log_level" in capsys.readouterr().err.splitlines()[-1]
    assert main(["serve", "m", "--log-config-file", "/nowhere/log.json"]) == 1
    assert "log_config_file" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "render"),
    [("config.md", render_config_docs), ("metrics.md", render_metrics_docs)],
    ids=["config.md", "metrics.md"],
)
def test_generated_pages_are_up_to_date(name, render) -> None:
    assert (ROOT / "docs" / name).read_text("utf-8") == render(), "run scripts/docs"


def test_build_kernels_tells_what_the_compiler_said(capsys, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    compiler = tmp_path / "compiler"
    compiler.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo fake 1 && exit\necho kernel.cpp:1: error: no >&2; exit 1\n"
    )
    compiler.chmod(0o755)
    assert main(["build-kernels", "--isa", "portable", "--compiler", str(compiler)]) == 1
    error = capsys.readouterr().err
    assert "kernel.cpp:1: error: no" in error.splitlines()[-1] and "ziglang" in error.splitlines()[-1]


def test_build_kernels_finds_what_is_built(capfd) -> None:
    assert main(["build-kernels"]) == 0
    assert main(["build-kernels"]) == 0
    path, what = capfd.readouterr().out.splitlines()[-2:]
    assert path.endswith(".so") and what.endswith("already there")


def test_build_kernels_rejects_unknown_instruction_sets(capsys) -> None:
    assert main(["build-kernels", "--isa", "avx1024"]) == 1
    assert "avx1024" in capsys.readouterr().err.splitlines()[-1]


def test_lists_and_second_names_of_flags(tmp_path) -> None:
    from octavo.frontend.cli.flags import config_parser

    file = tmp_path / "settings.yaml"
    file.write_text("max-num-queued-requests: 3\nallowed-origins: [https://a]\n")
    parse = config_parser("octavo serve", "").parse_settings
    said = parse(["m", "--config", str(file), "--allowed-headers", '["x-a", "x-b"]', "x-c"])
    assert said["max_num_queued_reqs"] == 3 and said["allowed_origins"] == ["https://a"]
    assert said["allowed_headers"] == ["x-a", "x-b", "x-c"]
    said = parse(["m", "--config", str(file), "--max-num-queued-requests", "4", "--allowed-origins", "[]"])
    assert said["max_num_queued_reqs"] == 4 and said["allowed_origins"] == []


def test_a_list_that_is_not_json(capsys) -> None:
    from octavo.frontend.cli.flags import config_parser

    with pytest.raises(SystemExit):
        config_parser("octavo serve", "").parse_flags(["m", "--allowed-origins", "[a"])
    assert "--allowed-origins" in capsys.readouterr().err


def test_sigterm_before_the_server_heeds_it_has_its_last_words(monkeypatch, capsys) -> None:
    def be_told(words: list[str]) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        return 0

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("octavo.frontend.cli.serve._run", be_told)
    assert main(["serve", "M"]) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "octavo: SIGTERM while starting\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_file_that_has_become_wrong_ends_no_server(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    words = ["--config", str(file), "--max-num-seqs", "3"]
    file.write_text("model: /models/a\n")
    assert engine_now(words).model.model == "/models/a"
    for wrong in ("max-num-seqs: 4\n", "model: [\n", "modl: a\n", "model: a\nblock-size: -1\n"):
        file.write_text(wrong)
        with pytest.raises(ConfigError):
            engine_now(words)
