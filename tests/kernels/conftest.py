"""The native library, once for each instruction set that this processor has."""

import os

import pytest
from native_checks import IN_LONG_RUNS, LEVELS

from octavo.kernels.native import library
from octavo.kernels.native.build import Toolchain
from octavo.kernels.native.isa import Processor
from octavo.kernels.native.library import NativeLibrary

FLAGS = os.environ.get("OCTAVO_TEST_FLAGS", "")
"""More flags for the compiler: how `scripts/check_native` builds with sanitizers."""
COMPILER = os.environ.get("OCTAVO_TEST_CXX")

if FLAGS or COMPILER:
    library.DEFAULT = Toolchain(flags=tuple(FLAGS.split()), compiler=COMPILER)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave some levels to `--long`; and only what uses the library when it is built in another way than for users."""
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if parameters.get("native_library") in IN_LONG_RUNS:
            item.add_marker("long")
    if FLAGS or COMPILER:
        others = [item for item in items if "native_library" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


@pytest.fixture(scope="session", params=LEVELS)
def native_library(request: pytest.FixtureRequest) -> NativeLibrary:
    """Return the library of one level; every test that asks for it runs at all levels, some of them with `--long`.

    A slow test may name the levels itself, as one of its pairwise parameters (`LEVELS`, `indirect=["native_library"]`).

    Built in the user's cache, so that only the first run after a change compiles. To compile less, the best level is
    the library that engines of this machine use, and the portable one, which takes a minute more to optimize than all
    others, is hardly optimized. `--long` tests both as they are built for other machines.
    """
    level, is_quick = request.param, not (FLAGS or COMPILER or request.config.getoption("--long"))
    if is_quick and level == Processor.read().levels()[0].name:
        return library.load()
    return library.load(level, toolchain=Toolchain(flags=("-O1",)) if is_quick and level == "portable" else None)
