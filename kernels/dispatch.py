"""The choice of an implementation by device, and the errors all operations raise. Holds no implementation.

Every operation imports it, so it is also where torch is prepared for all of them.
"""

from collections.abc import Mapping
from typing import TypeVar

import torch

from octavo.kernels.vector_math import prepare_vector_math

prepare_vector_math()

Implementation = TypeVar("Implementation")


class UnsupportedDevice(NotImplementedError):
    """The operation has no implementation for the device of its arguments."""


class ShapeError(ValueError):
    """The shapes, dtypes or devices of an operation's arguments do not go together."""


def choose(operation: str, implementations: Mapping[str, Implementation], device: torch.device) -> Implementation:
    """Return the implementation for tensors on `device`.

    Args:
        operation: its name, for the message of the error.
        implementations: by `torch.device.type`.
        device: where the arguments are.

    Raises:
        UnsupportedDevice: there is none. Nothing falls back to another device's.
    """
    try:
        return implementations[device.type]
    except KeyError:
        others = ", ".join(sorted(implementations))
        raise UnsupportedDevice(
            f"{operation} has no implementation for {device.type}; there is one for: {others}"
        ) from None


def require(condition: bool, message: str) -> None:
    """Raise `ShapeError` with `message` unless `condition` holds."""
    if not condition:
        raise ShapeError(message)
