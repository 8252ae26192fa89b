"""`mask_tokens` in C++: its arguments, mirrored from `native.h`."""

import ctypes

from torch import Tensor

from octavo.kernels.native.arguments import Arguments
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import NativeLibrary


class MaskTokensArguments(Arguments):
    """See `MaskTokensArgs`."""

    _fields_ = (("logits", ctypes.c_void_p), ("allowed", ctypes.c_void_p), ("width", ctypes.c_int64))


def mask_tokens(library: NativeLibrary, logits_V: Tensor, allowed_W: Tensor) -> None:
    """See `octavo.kernels.token_mask.mask_tokens`."""
    run(library, "mask_tokens", MaskTokensArguments(logits_V.data_ptr(), allowed_W.data_ptr(), logits_V.numel()))
