"""Functions of single numbers: factors, soft caps, limits and squared activations. Each is rounded once."""

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.pointwise import cpu, native
from octavo.kernels.pointwise.functions import Function

_IMPLEMENTATIONS = {
    "cpu": cpu.pointwise,
    "recorded": native.record,
    "cuda": lazy("octavo.kernels.pointwise.gpu", cpu.pointwise),
}


def scale(x: Tensor, factor: float) -> Tensor:
    """Return `factor * x`.

    Raises:
        UnsupportedDevice: no implementation for the device.
    """
    return _apply(Function.SCALE, x, factor)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return `cap * tanh(x / cap)`.

    Raises:
        ShapeError: the cap is not positive.
        UnsupportedDevice: no implementation for the device.
    """
    require(cap > 0.0, f"soft_cap: a cap of {cap}")
    return _apply(Function.SOFT_CAP, x, cap)


def clamp(x: Tensor, limit: float) -> Tensor:
    """Return `x` limited to [-limit, limit]; NaN stays NaN.

    Raises:
        ShapeError: the limit is not positive.
        UnsupportedDevice: no implementation for the device.
    """
    require(limit > 0.0, f"clamp: a limit of {limit}")
    return _apply(Function.CLAMP, x, limit)


def relu_squared(x: Tensor) -> Tensor:
    """Return the square of the positive part of `x`.

    Raises:
        UnsupportedDevice: no implementation for the device.
    """
    return _apply(Function.RELU_SQUARED, x, 0.0)


def _apply(function: Function, x: Tensor, parameter: float) -> Tensor:
    return choose(function.name.lower(), _IMPLEMENTATIONS, x.device)(function, x, parameter)
