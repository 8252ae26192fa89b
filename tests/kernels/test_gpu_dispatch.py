"""Which operations have a GPU implementation, how it is found, and the error if there is none."""

import importlib
import inspect
import pkgutil
import sys

import pytest

from octavo import kernels
from octavo.kernels import dispatch
from octavo.kernels.dispatch import UnsupportedDevice, lazy

PACKAGES = {
    name: package
    for _, name, _ in pkgutil.iter_modules(kernels.__path__)
    if hasattr(package := importlib.import_module(f"octavo.kernels.{name}"), "_IMPLEMENTATIONS")
}
"""The operations that choose an implementation by device, by name."""
GPU_MODULES = [
    package
    for package in PACKAGES.values()
    if package._IMPLEMENTATIONS.get("cuda", package._IMPLEMENTATIONS["cpu"]) is not package._IMPLEMENTATIONS["cpu"]
]
"""Those whose GPU implementation is not that of the CPU."""
SAMPLING = {"filter_logits", "gumbel_sample", "logprobs", "penalties", "timestamp_mask", "token_mask", "top_k"}
"""Operations on one row of logits. On GPUs, the kernels of `octavo.kernels.sample` compute all rows at once."""


def test_every_operation_of_a_model_has_one() -> None:
    assert {name for name, package in PACKAGES.items() if "cuda" not in package._IMPLEMENTATIONS} == SAMPLING


@pytest.mark.parametrize("package", GPU_MODULES, ids=lambda package: package.__name__)
def test_it_takes_what_the_cpu_takes(package) -> None:
    like = package._IMPLEMENTATIONS["cpu"]
    function = getattr(importlib.import_module(f"{package.__name__}.gpu"), like.__name__)
    assert list(inspect.signature(function).parameters) == list(inspect.signature(like).parameters)


def test_triton_is_imported_by_the_first_call_and_its_absence_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def relu() -> None:
        """Stand in for an implementation."""

    call = lazy("octavo.kernels.rope.gpu", relu)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "octavo.kernels.rope.gpu", raising=False)
    dispatch._function.cache_clear()
    with pytest.raises(UnsupportedDevice, match="needs triton, which is not installed"):
        call()


def test_other_missing_modules_are_what_they_are() -> None:
    def relu() -> None:
        """Stand in for an implementation."""

    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        lazy("octavo.kernels.no_such_module", relu)()
