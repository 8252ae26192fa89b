"""Shell completion: the proposals of bash with the generated script, and the text of the other scripts."""

import argparse
import contextlib
import io
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from octavo.frontend.cli import main
from octavo.frontend.cli.completion import SHELLS, full_parser
from octavo.frontend.cli.main import BENCHMARKS, COMMANDS


@cache
def script(shell: str) -> str:
    """Return what `octavo completion SHELL` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["completion", shell]) == 0
    return printed.getvalue()


def complete(line: str, folder: Path) -> list[str]:
    """Return what bash offers at the end of a line."""
    words = line.split() + ([""] if line.endswith(" ") else [])
    commands = f"""
{script("bash")}
compopt() {{ :; }}  # works only while bash completes a line
COMP_WORDS=({" ".join(f"'{word}'" for word in words)})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_octavo
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash"], input=commands, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.gguf").touch()
    (tmp_path / "models").mkdir()
    return tmp_path


def test_commands(folder: Path) -> None:
    assert complete("octavo ", folder) == [command.name for command in COMMANDS]
    assert complete("octavo ser", folder) == ["serve"]
    assert complete("octavo bench ", folder) == [command.name for command in BENCHMARKS]
    assert complete("octavo completion ", folder) == list(SHELLS)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("octavo serve --max-num-s", ["--max-num-seqs"]),
        ("octavo serve some/model --port 8000 --enable-pre", ["--enable-prefix-caching"]),
        ("octavo serve --no-enable-pre", ["--no-enable-prefix-caching"]),
        ("octavo bench serve --num-p", ["--num-prompts"]),
        ("octavo bench latency m --num-iters-", ["--num-iters-warmup"]),
        ("octavo chat -q hi --sys", ["--system-prompt"]),
        ("octavo chat --num-p", []),
        ("octavo chat --url ", []),
        ("octavo completion --he", ["--help"]),
        ("octavo serve m --kv-cache-dtype in", ["int8"]),
        ("octavo serve --cpu-offload-g", []),  # accepted for vLLM's sake, and not shown
    ],
)
def test_flags_and_values(line: str, offered: list[str], folder: Path) -> None:
    assert complete(line, folder) == offered


def test_files_where_a_file_belongs(folder: Path) -> None:
    assert sorted(complete("octavo serve mod", folder)) == ["model.gguf", "models"]
    assert complete("octavo serve --model model.", folder) == ["model.gguf"]
    assert sorted(complete("octavo run-batch m -i ", folder)) == ["model.gguf", "models"]


def all_flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from all_flags(below)
        elif action.help is not argparse.SUPPRESS:
            yield from action.option_strings


@pytest.mark.parametrize("shell", SHELLS)
def test_every_flag_of_every_command_is_in_every_script(shell: str) -> None:
    flags = set(all_flags(full_parser()))
    assert {"--max-num-seqs", "--system-prompt", "--goodput", "--num-iters-cold", "-o"} <= flags
    assert [flag for flag in flags if flag.lstrip("-") not in script(shell)] == []


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shutil.which(shell)])
def test_scripts_parse(shell: str) -> None:
    done = subprocess.run([shell, "-n"], input=script(shell), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_unknown_shell_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["completion", "nushell"])
    assert stopped.value.code == 2
