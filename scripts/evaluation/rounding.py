"""Loss added by rounding the inputs of layers in groups, estimated from coarser rounding.

Products with weights in groups round their inputs in groups of up to 32, to 12 bits (docs/adr/0062). At 8 bits and more
the added loss is smaller than its standard error on a text of a few thousand tokens. Rounding errors have no direction,
so the loss that they add grows with the square of their size: with 6 bits it is 17 times as large as with 8, and its
standard error 4 times. Each line has the resulting estimates for 8 and 12 bits. A model of transformers in float32
computes all of it; kernels of octavo compute with the same levels (`tests/kernels/test_quantize.py`).

    PYTHONPATH=tests/support .venv/bin/python scripts/evaluation/rounding.py --model MODEL --text TEXT
"""

import argparse
from pathlib import Path

import formats
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.frontend.evaluation.quality import fixed_text

LAYERS = {
    "attention inputs": ("q_proj", "k_proj", "v_proj"),
    "attention outputs": ("o_proj",),
    "gates and ups": ("gate_proj", "up_proj"),
    "downs": ("down_proj",),
    "output layer": ("lm_head",),
}


def main() -> None:
    """Print a line for each kind of layer, and for all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of a Llama with safetensors")
    parser.add_argument("--text", type=Path, help="text that the model reads; default: about a thousand words")
    parser.add_argument("--tokens", type=int, help="tokens of the text that are read; default: all")
    parser.add_argument("--skip", type=int, default=0, help="tokens to skip at the beginning of the text")
    parser.add_argument(
        "--bits",
        type=int,
        nargs="+",
        default=[8, 7, 6, 5],
        help="bits to which the inputs of all layers are rounded; default: 8 7 6 5",
    )
    parser.add_argument("--group-size", type=int, default=32)
    options = parser.parse_args()
    text = options.text.read_text() if options.text else fixed_text()
    tokens = AutoTokenizer.from_pretrained(options.model)(text)["input_ids"][options.skip :][: options.tokens]
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval().requires_grad_(False)
    exact = formats.losses_of_tokens(model, tokens)
    print(
        f"{len(exact)} tokens of {options.model.name}, groups of {options.group_size}, loss {float(exact.mean()):.4f}"
    )
    everything = tuple(end for ends in LAYERS.values() for end in ends)
    cases = [("all", everything, bits) for bits in options.bits]
    cases += [("all but the output layer", everything[:-1], 6)]
    cases += [(name, ends, 6) for name, ends in reversed(LAYERS.items())]
    for name, ends, bits in cases:
        added = rounded_losses(model, tokens, ends, bits, options.group_size) - exact
        mean, error = float(added.mean()), float(added.std() / len(added) ** 0.5)
        line = f"{name}, {bits} bits: added {mean:+.5f} +- {error:.5f}"
        for wanted in (8, 12):
            factor = (largest_level(bits) / largest_level(wanted)) ** 2
            line += f"; at {wanted} bits {factor * mean:+.6f} +- {factor * error:.6f}"
        print(line, flush=True)


def largest_level(bits: int) -> int:
    """Return the level of the largest magnitude of a group."""
    return int(2 ** (bits - 1) - 1)


def rounded_losses(model: nn.Module, tokens: list[int], ends: tuple[str, ...], bits: int, group_size: int) -> Tensor:
    """Return the negative logprobs of tokens while the inputs of some layers are rounded.

    Args:
        model: the model, which is restored afterwards.
        tokens: the tokens of the text.
        ends: suffixes of the names of the layers.
        bits: bits of a level.
        group_size: inputs that share a scale.
    """

    def rounded(layer: nn.Module, rows: tuple[Tensor]) -> Tensor:
        groups = rows[0].unflatten(-1, (-1, group_size))
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / largest_level(bits)
        return ((groups / scale).round() * scale).flatten(-2)

    layers = [layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and name.endswith(ends)]
    hooks = [layer.register_forward_pre_hook(rounded) for layer in layers]
    losses = formats.losses_of_tokens(model, tokens)
    for hook in hooks:
        hook.remove()
    return losses


if __name__ == "__main__":
    main()
