"""Loss of each type of keys and values in the cache: perplexity and top-1 agreement on a fixed text.

The reference is transformers in float32, with a cache that rounds keys and values by the type's formula. Its loss is
the cost of the rounding. The difference to octavo's loss is what our kernels add, for example by rounding queries. See
`formats.py`.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from formats import added, octavo_reading, reference_losses, reference_of
from torch import Tensor, nn

from octavo.frontend.evaluation.quality import fixed_text
from octavo.worker_proc.cache_calibration import MAX_TOKENS, calibration_tokens

Rounding = Callable[[Tensor, int, int], Tensor]
"""Rounds the keys (0) or values (1) of a layer."""


def main() -> None:
    """Print a line for each type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="directory of a model with safetensors")
    options = parser.parse_args()
    text, model = fixed_text(), reference_of(options.model, None)
    original = octavo_reading(options.model, text)
    base = reference_losses(model, options.model, text)
    print(f"{len(original.logprobs)} tokens of {options.model.name}; octavo and transformers, weights of float32")
    row = "{:<22} {:>10} {:>10} {:>10} {:>20}".format
    print(row("cache", "perplexity", "agreement", "lost", "added by us"))
    print(row("float32", f"{original.perplexity:.4f}", "", "", added(original, base)[1]))
    for name, rounding, settings in (
        ("int8", in_8_bits, {"kv_cache_dtype": "int8"}),
        ("fp8", lambda x, layer, kind: in_floats(x, 1.0), {"kv_cache_dtype": "fp8"}),
        ("fp8, measured scales", with_measured_scales(model), {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}),
    ):
        reading = octavo_reading(options.model, text, **settings)
        expected = reference_losses(WithCache(model, rounding), options.model, text)
        lost = f"{float((expected - base).mean()):+.4f}"
        shown = f"{original.agreement(reading):.2%}", lost, added(reading, expected)[1]
        print(row(name, f"{reading.perplexity:.4f}", *shown), flush=True)


class WithCache(nn.Module):
    """A model whose cache returns rounded keys and values."""

    def __init__(self, model: nn.Module, rounding: Rounding) -> None:
        super().__init__()
        self._model = model
        self._rounding = rounding

    def forward(self, tokens: Tensor) -> Any:
        """Return the model's outputs, for tokens whose keys and values are all in the cache."""
        rounding = self._rounding

        class Cache(transformers.DynamicCache):
            def update(self, keys: Tensor, values: Tensor, layer: int, *more: Any, **named: Any) -> Any:
                return super().update(rounding(keys, layer, 0), rounding(values, layer, 1), layer, *more, **named)

        return self._model(tokens, None, None, Cache())  # positional arguments: transformers 5.24 renamed them


def in_8_bits(x: Tensor, layer: int, kind: int) -> Tensor:
    """Round keys or values to integers, with a scale for each of them."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def in_floats(x: Tensor, scale: float) -> Tensor:
    """Round to E4M3."""
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def with_measured_scales(model: nn.Module) -> Rounding:
    """Return the rounding that `--calculate-kv-scales` causes."""
    scales: dict[tuple[int, int], float] = {}

    def measure(x: Tensor, layer: int, kind: int) -> Tensor:
        scales[layer, kind] = 2.0 ** math.ceil(math.log2(2 * float(x.abs().max()) / 448))
        return x

    with torch.inference_mode():
        WithCache(model, measure)(torch.tensor([calibration_tokens(model.config.vocab_size, MAX_TOKENS)]))
    return lambda x, layer, kind: in_floats(x, scales[layer, kind])


if __name__ == "__main__":
    main()
