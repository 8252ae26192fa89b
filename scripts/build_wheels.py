"""The program behind `scripts/build_wheels`: octavo's sdist and wheel, and octavo_prebuilt with the CPU kernels.

octavo itself has no compiled code: its kernels are compiled at the first start. On a machine without a compiler it uses
the libraries of octavo_prebuilt, if they were built from the same sources. They need a glibc as new as that of the
building machine; `--compiler "python -m ziglang c++ -target x86_64-linux-gnu.2.28"` builds for older ones.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from octavo.kernels.native.build import PREBUILT_PACKAGE, Toolchain, build
from octavo.kernels.native.isa import OTHER_LEVELS, X86_LEVELS

ROOT = Path(__file__).resolve().parent.parent

SOURCES = (
    *("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"),
    *("protocol", "frontend", "core_proc", "worker_proc", "kernels"),
)
"""Paths that the sdist contains. It is built from a copy, so that the checkout gets no build folder."""

LEVELS = tuple(level.name for level in (X86_LEVELS if platform.machine() == "x86_64" else OTHER_LEVELS))


def main(arguments: Sequence[str]) -> int:
    """Build what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser("scripts/build_wheels", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the files; default: dist")
    parser.add_argument(
        "--isa",
        nargs="*",
        choices=LEVELS,
        default=LEVELS,
        help="instruction set levels in octavo_prebuilt; none: skip it",
    )
    parser.add_argument("--compiler", help="compiler of the kernels; default: the one that octavo build-kernels uses")
    parser.add_argument("--only-kernels", action="store_true", help="no sdist and no wheel of octavo")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    made = [] if options.only_kernels else build_octavo(options.out)
    if options.isa:
        made.append(build_kernels(options.out, options.isa, options.compiler))
    for path in made:
        print(path)
    return 0


def build_octavo(out: Path) -> list[Path]:
    """Write the sdist, and the wheel from it, as `python -m build` does; return their paths."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "octavo"
        source.mkdir()
        for name in SOURCES:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, source / name)
        sdist = run_hook(source, "build_sdist", out)
        shutil.unpack_archive(sdist, scratch, filter="data")
        unpacked = Path(scratch) / sdist.name.removesuffix(".tar.gz")
        return [sdist, run_hook(unpacked, "build_wheel", out)]


def build_kernels(out: Path, levels: Sequence[str], compiler: str | None) -> Path:
    """Compile the kernels for the given instruction set levels and write their wheel; return its path."""
    with tempfile.TemporaryDirectory() as scratch:
        toolchain = Toolchain(Path(scratch) / "cache", compiler)
        package = Path(scratch) / "source" / PREBUILT_PACKAGE
        package.mkdir(parents=True)
        (package / "__init__.py").write_text('"""Kernels of octavo that were compiled elsewhere."""\n')
        for level in levels:
            built = build(toolchain, level)
            print(f"{level}: {built.seconds:.0f} s", file=sys.stderr)
            shutil.copy2(built.path, package)
        version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        (package.parent / "pyproject.toml").write_text(
            '[build-system]\nrequires = ["setuptools>=80"]\nbuild-backend = "setuptools.build_meta"\n'
            f'[project]\nname = "{PREBUILT_PACKAGE}"\nversion = "{version}"\n'
            'description = "Compiled CPU kernels of octavo"\nrequires-python = ">=3.11"\nlicense = "Apache-2.0"\n'
            f'[tool.setuptools]\npackages = ["{PREBUILT_PACKAGE}"]\n'
            f'[tool.setuptools.package-data]\n"{PREBUILT_PACKAGE}" = ["*.so"]\n'
        )
        (package.parent / "setup.cfg").write_text(
            f"[bdist_wheel]\npython_tag = py3\nplat_name = linux_{platform.machine()}\n"
        )
        return run_hook(package.parent, "build_wheel", out)


def run_hook(source: Path, hook: str, out: Path) -> Path:
    """Call a function of the build backend in a separate process; return the path of the file that it wrote."""
    code = f"from setuptools import build_meta; print(build_meta.{hook}({str(out.resolve())!r}))"
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=source, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{hook} failed:\n{done.stdout}")
    return out.resolve() / done.stdout.splitlines()[-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
