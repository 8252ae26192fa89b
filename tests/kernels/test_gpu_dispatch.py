"""Which operations have a GPU implementation, how it is found, and the error if there is none."""

import importlib
import inspect
import pkgutil
import sys

import pytest

from octavo import kernels
from octavo.kernels import dispatch
from octavo.kernels.dispatch import UnsupportedDevice, lazy

PACKAGES = [
    package
    for package in (
        importlib.import_module(f"octavo.kernels.{name}") for _, name, _ in pkgutil.iter_modules(kernels.__path__)
    )
    if "cuda" in getattr(package, "_IMPLEMENTATIONS", {})
]


def test_every_operation_of_a_model_and_a_draw_has_one() -> None:
    names = {package.__name__.rpartition(".")[2] for package in PACKAGES}
    assert names >= {
        "add",
        "cast",
        "embedding",
        "gelu",
        "layer_norm",
        "quantize",
        "relu",
        "rms_norm",
        "rope",
        "rope_store_kv",
    }
    assert names >= {"silu_and_mul", "store_kv", "filter_logits", "logprobs", "penalties"}
    assert names >= {"causal_conv1d", "selective_scan", "gated_delta_rule", "gated_rms_norm", "multiply"}
    assert names >= {
        "token_mask",
        "top_k",
        "gelu_and_mul",
        "pointwise",
        "routing",
        "experts",
        "sigmoid_and_mul",
        "varlen_attention",
    }


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
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
