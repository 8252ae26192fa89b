"""The kernels of GPUs: on the GPU of this machine, or in Triton's interpreter if TRITON_INTERPRET is 1.

Without either these tests are skipped. `tests/kernels/test_triton_interpreter.py` runs them all in the interpreter, in
processes of their own, because Triton decides for a whole process.
"""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from triton_interpreter import IS_INTERPRETING, repair

from octavo.worker_proc.device.cuda import prepare_products

if IS_INTERPRETING:
    repair()
elif torch.cuda.is_available():
    # As an engine does it by default, and before anything is computed.
    prepare_products(is_deterministic=True)


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
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    # The interpreter's numpy warns of what a GPU computes without a word: exp of a large number is infinite.
    with np.errstate(all="ignore"):
        yield
    torch.use_deterministic_algorithms(False)
