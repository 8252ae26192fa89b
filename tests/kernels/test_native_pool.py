"""The thread pool alone, driven by a C++ program that uses all of its interface."""

import subprocess
from pathlib import Path

from source_tree import ROOT

from octavo.kernels.native.build import FLAGS, SOURCES
from octavo.kernels.native.compilers import find_compilers


def test_pool_keeps_its_promises(tmp_path: Path) -> None:
    program = tmp_path / "pool_stress"
    sources = [ROOT / "tests/support/pool_stress.cpp", SOURCES / "native/pool.cpp", SOURCES / "native/program.cpp"]
    arguments = [*FLAGS, "-Werror", f"-I{SOURCES}", *map(str, sources), "-o", str(program)]
    next(find_compilers(None)).run(arguments, timeout_s=120)
    done = subprocess.run([program, "200"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
