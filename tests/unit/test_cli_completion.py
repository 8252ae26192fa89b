"""Completion as bash does it, and the scripts for the other shells as far as text shows."""

import shutil
import subprocess
from pathlib import Path

import pytest

from octavo.frontend.cli import main
from octavo.frontend.cli.completion import SHELLS, bash, fish, pages, zsh
from octavo.frontend.cli.main import BENCHMARKS, COMMANDS

PAGES = list(pages())


def complete(line: str, folder: Path) -> list[str]:
    """Return what bash offers at the end of a line, having split it as bash does."""
    words = line.replace("=", " = ").split() + ([""] if line.endswith(" ") else [])
    script = f"""
{bash(PAGES)}
compopt() {{ :; }}  # works inside a real completion only
COMP_WORDS=({" ".join(f"'{word}'" for word in words)})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_octavo
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=folder, check=False)
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
    assert complete("octavo bench ", folder) == ["serve", "throughput", "latency", "startup", "chaos"]
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
    ],
)
def test_flags(line: str, offered: list[str], folder: Path) -> None:
    assert complete(line, folder) == offered


@pytest.mark.parametrize("line", ["octavo serve m --kv-cache-dtype ", "octavo serve m --kv-cache-dtype="])
def test_values_of_flags(line: str, folder: Path) -> None:
    offered = complete(line, folder)
    assert {"auto", "int8", "bfloat16"} <= set(offered) and not [word for word in offered if word.startswith("-")]
    assert complete(line + "in", folder) == ["int8"]


def test_commands_without_arguments_offer_their_flags(folder: Path) -> None:
    assert complete("octavo collect-env ", folder) == ["-h", "--help", "--json"]


def test_files_where_a_file_belongs(folder: Path) -> None:
    assert sorted(complete("octavo serve mod", folder)) == ["model.gguf", "models"]
    assert complete("octavo serve --model model.", folder) == ["model.gguf"]
    assert sorted(complete("octavo run-batch m -i ", folder)) == ["model.gguf", "models"]


def test_every_flag_of_every_command_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    flags = {name for page in PAGES for flag in page.flags for name in flag.names}
    assert {"--max-num-seqs", "--system-prompt", "--goodput", "--num-iters-cold", "-o"} <= flags
    assert all(name in script for name in flags)
    assert len(PAGES) == len(COMMANDS) + 1 + len(BENCHMARKS)


@pytest.mark.parametrize(("shell", "script"), [("bash", bash(PAGES)), ("zsh", zsh(PAGES)), ("fish", fish(PAGES))])
def test_scripts_parse(shell: str, script: str) -> None:
    """A shell that is not installed cannot tell; that the quotes are even is known without it."""
    path = shutil.which(shell)
    if path:
        done = subprocess.run([path, "-n"], input=script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    escaped = script.replace("'\\''", "").replace("\\'", "")
    assert all(line.count("'") % 2 == 0 for line in escaped.splitlines() if not line.startswith("#"))


def test_unknown_shell_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["completion", "tcsh"])
    assert stopped.value.code == 2
