"""Whether octavo's kernels give the bits of a format's formula in every layer of a model, on the inputs of a text.

For formats that round activations to 8 bits with one scale for each row. The losses of two complete models cannot show
a small difference: a last bit of any sum moves a number to the next integer, later layers have more of them, and the
loss of each token moves by 0.3 nats. So a model of transformers reads the text, and each quantized layer computes its
outputs twice from the same inputs: by the formula (levels and scales by the format's tool, exact sums of integers) and
by octavo's kernels. If all outputs are equal, the kernels add nothing to the loss. The rest of octavo's computation, in
float32, accounts for what it adds to the loss of the original model; `formats.py` prints that.

    PYTHONPATH=tests/support .venv/bin/python scripts/evaluation/rows.py --model MODEL --work DIRECTORY
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import formats
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from linear_products import multiply
from safetensors.torch import load_file
from torch import Tensor, nn
from torchao.quantization import Int8Tensor, PerRow
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.frontend.evaluation.quality import fixed_text
from octavo.kernels.linear.packing import pack_quantized
from octavo.kernels.linear.quantized import QuantizedWeight
from octavo.kernels.native.library import load
from octavo.kernels.quantize.scaling import Scaling

TOKEN = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)


def rounded_by_compressed_tensors(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return levels and scales of rows."""
    scale, zero = compute_dynamic_scales_and_zp(rows.unsqueeze(0), TOKEN, nn.Module())
    return quantize(rows.unsqueeze(0), scale, zero, TOKEN, dtype=torch.int8)[0], scale[0]


def rounded_by_torchao(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return levels and scales of rows."""
    rounded = Int8Tensor.from_hp(rows, PerRow())
    return rounded.qdata, rounded.scale


@dataclass(frozen=True)
class RowFormat:
    """A format that rounds rows."""

    rounding: Callable[[Tensor], tuple[Tensor, Tensor]]
    scaling: Scaling
    """The same rounding in octavo's kernels."""
    levels: str
    """Suffix of the name of the tensor with a weight's levels."""
    scales: str


FORMATS = {
    "int8": RowFormat(rounded_by_compressed_tensors, "range", "weight", "weight_scale"),
    "torchao-int8-dynamic": RowFormat(rounded_by_torchao, "reciprocal", "_weight_qdata", "_weight_scale"),
}


class TwiceComputed(nn.Module):
    """A linear layer of a format, by its formula and by octavo's kernels.

    Args:
        form: the format.
        weight_levels: int8, shape (outputs, inputs).
        weight_scale: shape (outputs, 1).
    """

    def __init__(self, form: RowFormat, weight_levels: Tensor, weight_scale: Tensor) -> None:
        super().__init__()
        self._form, self._weight_scale, self._weight_levels = form, weight_scale.float().t(), weight_levels.double().t()
        weight = QuantizedWeight(
            weight_levels.view(torch.uint8) ^ 128,
            weight_scale.float(),
            None,
            128,
            8,
            weight_levels.shape[1],
            row_type="int8_token",
            row_scaling=form.scaling,
        )
        self._packed = pack_quantized(load(), weight)
        self.num_products = self.num_different = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs by the formula, and count the kernels' outputs with other bits."""
        rows = x.flatten(0, -2)
        levels, scale = self._form.rounding(rows)
        sums = levels.double() @ self._weight_levels  # exact: integers below 2 ** 53
        expected = sums.float() * (self._weight_scale * scale)
        actual = multiply(load(), rows.contiguous(), self._packed)
        self.num_products += expected.numel()
        self.num_different += int((actual != expected).sum())
        return expected.view(*x.shape[:-1], -1)


def main() -> None:
    """Print a line for each format; exit with 1 if a product has other bits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of a model with safetensors")
    parser.add_argument("--work", type=Path, required=True, help="directory for checkpoints, which are reused")
    parser.add_argument("--text", type=Path, help="text that the models read; default: about a thousand words")
    parser.add_argument("--tokens", type=int, help="tokens of the text that are read; default: all")
    options = parser.parse_args()
    text = options.text.read_text() if options.text else fixed_text()
    tokens = AutoTokenizer.from_pretrained(options.model)(text)["input_ids"][: options.tokens]
    num_different = 0
    for name, form in FORMATS.items():
        path, _ = formats.FORMATS[name](options, name)
        assert path is not None, "both are checkpoints"
        model, layers = model_of(options.model, load_file(path / "model.safetensors"), form)
        losses = formats.losses_of_tokens(model, tokens)
        different = sum(layer.num_different for layer in layers)
        total = sum(layer.num_products for layer in layers)
        print(
            f"{name}: {len(losses)} tokens, {len(layers)} layers, {total:,} outputs, {different:,} with other bits; "
            f"loss {float(losses.mean()):.4f}",
            flush=True,
        )
        num_different += different
    sys.exit(num_different > 0)


def model_of(original: Path, tensors: dict[str, Tensor], form: RowFormat) -> tuple[nn.Module, list[TwiceComputed]]:
    """Return the original model with the quantized layers of a checkpoint, and these layers."""
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).eval().requires_grad_(False)
    layers = []
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and f"{name}.{form.scales}" in tensors:
            assert layer.bias is None, "the formula has none"
            twice = TwiceComputed(form, tensors[f"{name}.{form.levels}"], tensors[f"{name}.{form.scales}"])
            model.set_submodule(name, twice)
            layers.append(twice)
    return model, layers


if __name__ == "__main__":
    main()
