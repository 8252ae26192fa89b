"""Chooses an operation's implementation by device, and defines the errors that all operations raise.

Every operation imports this module, so torch's vector math is initialized here once for all of them.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ParamSpec, TypeVar

import torch

from octavo.kernels.vector_math import prepare_vector_math

prepare_vector_math()

Implementation = TypeVar("Implementation")
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class UnsupportedDevice(NotImplementedError):
    """The operation has no implementation for the device of its arguments."""


class ShapeError(ValueError):
    """The shapes, dtypes or devices of an operation's arguments do not match."""


def choose(operation: str, implementations: Mapping[str, Implementation], device: torch.device) -> Implementation:
    """Return the implementation for tensors on `device`.

    Args:
        operation: name of the operation, for the error message.
        implementations: implementations by `torch.device.type`.
        device: device of the arguments.

    Raises:
        UnsupportedDevice: there is none for this kind of device. There is no fallback to another kind.
    """
    try:
        return implementations[device.type]
    except KeyError:
        others = ", ".join(sorted(implementations))
        raise UnsupportedDevice(
            f"{operation} has no implementation for {device.type}; there is one for: {others}"
        ) from None


def lazy(module: str, signature: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return a function that imports its namesake from `module` on the first call.

    For implementations in Triton: importing Triton takes a second, and many machines do not have it.

    Args:
        module: where the implementation is.
        signature: a function with the same name and parameters.
    """

    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        result: Result = _function(module, signature.__name__)(*args, **kwargs)
        return result

    return call


@cache
def _function(module: str, name: str) -> Callable[..., Any]:
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise UnsupportedDevice(
            f"{module} needs triton, which is not installed; the builds of torch for CUDA bring it along"
        ) from error
    return function


def require(condition: bool, message: str) -> None:
    """Raise `ShapeError` with `message` unless `condition` holds."""
    if not condition:
        raise ShapeError(message)
