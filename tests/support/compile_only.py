"""A pytest plugin that counts the kernels that tests/gpu would compile on a GPU, and compiles them if it is asked to.

    PYTHONPATH=tests/support pytest -p compile_only tests/gpu --ignore tests/gpu/pipeline [--compile]

The tests run with the parameters that they have on a GPU, on tensors of the CPU. Kernels are launched with Triton's own
rules for what needs another compilation, but never run, so results are not checked. A test that stops because of a
wrong result launches nothing after it. With `--compile` each kernel is compiled for Hopper, and the processor time of
that is added up.
"""

import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiled_kernels import no_launch
from triton.runtime.jit import JITFunction

_HOPPER = 90


class _Compilations:
    """Replaces Triton's compiler."""

    def __init__(self, *, compiles: bool) -> None:
        self.by_file: Counter[str] = Counter()
        self.by_kernel: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.file = ""
        self._compiles = compiles
        self._compile = JITFunction._do_compile

    def compile(self, function: Any, key: str, signature: Any, device: int, *others: Any) -> object:
        name = function.fn.__name__.strip("_")
        self.by_kernel[name] += 1
        self.by_file[self.file] += 1
        if not self._compiles:
            kernel = SimpleNamespace(hash=sum(self.by_kernel.values()))
            function.device_caches[device][0][key] = kernel
            return kernel
        before = _processor_time_s()
        compiled = self._compile(function, key, signature, device, *others)
        self.seconds[name] += _processor_time_s() - before
        return compiled


_COMPILATIONS = pytest.StashKey[_Compilations]()
_PATCHES = pytest.StashKey[ExitStack]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--compile", action="store_true", help="compile the kernels, for a GPU of compute capability 9.0")


def pytest_configure(config: pytest.Config) -> None:
    compilations = _Compilations(compiles=config.getoption("--compile"))
    patch, patches = pytest.MonkeyPatch(), ExitStack()
    patches.enter_context(no_launch(_HOPPER))
    patches.callback(patch.undo)
    patch.setattr(JITFunction, "_do_compile", lambda *arguments: compilations.compile(*arguments))
    # A test must make all of its launches, whatever their results are.
    patch.setattr(torch, "equal", lambda *tensors: True)
    patch.setattr(torch.testing, "assert_close", lambda *tensors, **options: None)
    config.stash[_COMPILATIONS], config.stash[_PATCHES] = compilations, patches


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_PATCHES].close()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that are skipped without a GPU."""
    for item in items:
        item.own_markers = [mark for mark in item.own_markers if "no GPU" not in str(mark.kwargs.get("reason"))]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.config.stash[_COMPILATIONS].file = item.path.name
    yield


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Iterator[None]:
    """Pass the CPU as the device to tests."""
    outcome = yield
    if fixturedef.argname == "device":
        fixturedef.cached_result = (torch.device("cpu"), *fixturedef.cached_result[1:])
        outcome.force_result(torch.device("cpu"))


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    """Let a test pass that stops because of a wrong result."""
    outcome = yield
    if isinstance(outcome.excinfo[1] if outcome.excinfo else None, (AssertionError, IndexError, RuntimeError)):
        outcome.force_result(True)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the counts."""
    found = config.stash[_COMPILATIONS]
    for name, count in found.by_file.items():
        terminalreporter.write_line(f"{name}: {count} compilations")
    for name, seconds in found.seconds.most_common():
        terminalreporter.write_line(f"{name}: {found.by_kernel[name]} compilations, {seconds:.1f} s")
    total = f"{sum(found.seconds.values()):.1f} s" if found.seconds else "not compiled"
    terminalreporter.write_line(f"all: {sum(found.by_file.values())} compilations, {total}")


def _processor_time_s() -> float:
    """Return the CPU time in seconds of this process and of the assemblers that it has run."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
