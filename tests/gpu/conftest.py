"""The kernels of GPUs: on the GPU of this machine, or in Triton's interpreter if TRITON_INTERPRET is 1.

Without either these tests are skipped. `tests/kernels/test_triton_interpreter.py` runs them all in the interpreter, in
processes of their own, because Triton decides for a whole process.

On a GPU compilation takes most of the time, so parameters that kernels are compiled for have few values, and a run ends
with the number of compilations. Use two runs: `-n 12 --dist loadgroup -m "not alone"`, then `-m alone`, for tests that
no other process may disturb.
"""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton_interpreter import IS_INTERPRETING, repair

from octavo.kernels import programmatic_launch
from octavo.protocol.env import Env
from octavo.worker_proc.device.cuda import prepare_products

IS_ON_GPU = not IS_INTERPRETING and torch.cuda.is_available()
COMPILATIONS = pytest.StashKey[int]()

if IS_INTERPRETING:
    repair()
    # The interpreter's numpy warns of what a GPU computes without a word: exp of a large number is infinite. Fixtures
    # compute too, with what memory held before.
    np.seterr(all="ignore")
elif IS_ON_GPU:
    # As an engine does it by default, and before anything is computed.
    prepare_products(is_deterministic=True)
    programmatic_launch.enable(Env.read().launches_early)


def pytest_configure(config: pytest.Config) -> None:
    """Count the kernels that this process compiles or loads from Triton's cache."""
    config.stash[COMPILATIONS] = 0
    if IS_ON_GPU:

        def count(**compiled: Any) -> None:
            config.stash[COMPILATIONS] += 1

        triton.knobs.runtime.jit_post_compile_hook = count


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand this process's count to the one that started it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["compilations"] = session.config.stash[COMPILATIONS]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Add up the counts of all processes."""
    if hasattr(node, "workeroutput"):
        node.config.stash[COMPILATIONS] += node.workeroutput.get("compilations", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the count."""
    if config.stash[COMPILATIONS]:
        terminalreporter.write_line(f"{config.stash[COMPILATIONS]} compilations of kernels")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say of each test of this folder what it needs."""
    skip = pytest.mark.skip(reason="no GPU; tests/kernels/test_triton_interpreter.py runs it without one")
    for item in items:
        if not IS_INTERPRETING and "tests/gpu/" in item.path.as_posix():
            item.add_marker("gpu")
            if not torch.cuda.is_available():
                item.add_marker(skip)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return where the kernels run."""
    return torch.device("cpu" if IS_INTERPRETING else "cuda")


@pytest.fixture
def seed() -> int:
    """Return a seed: another in each run on a GPU, printed by a test that fails; always 0 in the interpreter."""
    chosen = 0 if IS_INTERPRETING else random.SystemRandom().randrange(2**31)
    print(f"seed {chosen}")
    return chosen


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN, or the largest integer: no test may pass by what memory held before."""
    if IS_ON_GPU:
        # Not by torch's deterministic algorithms: they change what is computed, `index_copy_` for one.
        with Poison():
            yield
        return
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


class Poison(TorchFunctionMode):
    """Fills new memory that torch leaves as it is."""

    ALLOCATIONS = frozenset({torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self.ALLOCATIONS and result.is_cuda:
            if result.is_floating_point():
                result.fill_(torch.nan)
            elif result.dtype != torch.bool:
                result.fill_(torch.iinfo(result.dtype).max)
        return result
