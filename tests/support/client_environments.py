"""Environments of client libraries: a virtual environment or a folder of Node packages for each client.

They live in a cache outside of the repository, named by what is installed in them, and are built once.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

INSTALL_TIMEOUT_S = 600
_COMPLETE = "complete"
"""Name of the file that marks a completely installed environment."""


class NotInstallable(Exception):
    """The packages of a client cannot be installed on this machine."""


@dataclass(frozen=True)
class Environment:
    """The interpreter that runs a client's program."""

    path: Path
    interpreter: tuple[str, ...]

    def versions(self, packages: tuple[str, ...]) -> dict[str, str]:
        """Return the installed version of each package (without extras and pins)."""
        names = [_bare_name(package) for package in packages]
        if (self.path / "node_modules").exists():
            read = "console.log(JSON.parse(require('fs').readFileSync(process.argv[1])).version)"
            files = [self.path / "node_modules" / name / "package.json" for name in names]
            return {name: _output("node", "-e", read, str(file)) for name, file in zip(names, files, strict=True)}
        read = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
        return {name: _output(*self.interpreter, "-c", read, name) for name in names}


def python_environment(packages: tuple[str, ...]) -> Environment:
    """Return a virtual environment with these packages.

    Raises:
        NotInstallable: the installation failed; the message has the end of pip's output.
    """
    path = _path("python", packages)
    python = str(path / "bin" / "python")
    if not (path / _COMPLETE).exists():
        shutil.rmtree(path, ignore_errors=True)
        _install(sys.executable, "-m", "venv", str(path))
        _install(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)
        (path / _COMPLETE).touch()
    return Environment(path, (python,))


def node_environment(packages: tuple[str, ...]) -> Environment:
    """Return a folder with these Node packages.

    Raises:
        NotInstallable: Node is missing, or the installation failed; the message has the end of npm's output.
    """
    node = shutil.which("node")
    if node is None or shutil.which("npm") is None:
        raise NotInstallable("node and npm are not on PATH")
    path = _path("node", packages)
    if not (path / _COMPLETE).exists():
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        _install("npm", "install", "--prefix", str(path), "--no-audit", "--no-fund", "--loglevel=error", *packages)
        (path / _COMPLETE).touch()
    return Environment(path, (node,))


def isolated_variables(home: Path) -> dict[str, str]:
    """Return environment variables that isolate a program from this machine's settings and disable telemetry."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    return {
        **kept,
        "HOME": str(home),
        "DO_NOT_TRACK": "1",
        "DISABLE_TELEMETRY": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


def _path(kind: str, packages: tuple[str, ...]) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(repr((sys.version_info[:2], packages)).encode()).hexdigest()[:12]
    return cache / "octavo" / "clients" / f"{kind}-{_bare_name(packages[0]).replace('/', '-')}-{digest}"


def _bare_name(package: str) -> str:
    return "@" * package.startswith("@") + package.removeprefix("@").split("==")[0].split("@")[0].split("[")[0]


def _install(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NotInstallable(f"{command[0]} took longer than {INSTALL_TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise NotInstallable((done.stdout + done.stderr)[-2000:])


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
