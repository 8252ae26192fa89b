"""The variants of kernels that a GPU would compile for launches in Triton's interpreter."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import KernelParam, create_function_from_signature

Variant = tuple[str, str]
"""A kernel, and what Triton compiles it for: types, constants, alignment, and options."""


@contextmanager
def recorded_variants() -> Iterator[set[Variant]]:
    """Record the variant of every launch."""
    found: set[Variant] = set()
    original = InterpretedFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> object:
        _, specialization, options = _binder(self)(*args, **kwargs)
        found.add((self.__name__, f"{specialization} {sorted(options.items())}"))
        return original(self, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = run
    try:
        yield found
    finally:
        InterpretedFunction.run = original


@cache
def _binder(function: Any) -> Callable[..., tuple[Any, list[Any], dict[str, Any]]]:
    """Return what Triton calls for each launch of a compiled kernel."""
    signature = inspect.signature(function.fn)
    unspecialized = function.kwargs.get("do_not_specialize") or ()
    unaligned = function.kwargs.get("do_not_specialize_on_alignment") or ()
    parameters = [
        KernelParam(index, parameter, name in unspecialized, name in unaligned)
        for index, (name, parameter) in enumerate(signature.parameters.items())
    ]
    return create_function_from_signature(signature, parameters, CUDABackend)
