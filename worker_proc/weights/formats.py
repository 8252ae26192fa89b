"""Logs how linear layers compute with their weights: on quantized codes, or on dequantized values."""

import logging
from collections import Counter
from collections.abc import Iterable

from octavo.kernels.linear import PackedLinear, SizedProduct
from octavo.kernels.linear.native import NativeProduct
from octavo.worker_proc.models.linear_weight import LinearWeight

logger = logging.getLogger(__name__)

_KINDS = {
    "u4": "4-bit levels",
    "u8": "8-bit levels",
    "u8_channel": "8-bit levels and rows with one scale each",
    "e4m3": "8-bit floats",
    "float4": "4-bit codes",
}
_FLOATS = ("bf16", "bf16_12", "f16", "f32")


def log_formats(weights: Iterable[LinearWeight]) -> None:
    """Log one line per pair of a quantized format and its computation; nothing for plain weights."""
    counts = Counter((weight.stored, *_computed(weight.packed)) for weight in weights)
    for (stored, how, is_quantized), count in sorted(counts.items(), key=str):
        if stored is None and not is_quantized:
            continue
        weights_of = f"{count} weights{f' ({stored})' if stored else ''}"
        if is_quantized:
            logger.info("%s: products with %s", weights_of, how)
        else:
            logger.warning("%s: dequantized to %s, as no kernel here takes them", weights_of, how)


def _computed(packed: PackedLinear) -> tuple[str, bool]:
    """Return the type that a product computes with, and whether it is quantized."""
    if isinstance(packed.product, NativeProduct) and (kind := packed.product.packed.kind) not in _FLOATS:
        return _KINDS.get(kind, kind), True
    if isinstance(packed.product, SizedProduct):
        return packed.product.description, True
    return str(packed.dtype).removeprefix("torch."), False
