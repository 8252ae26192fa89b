"""How exact the product of each layer is with each GGUF type, even if the type makes a model unusable.

One or two bits destroy a small model. Its loss then says nothing about kernels: any last bit moves it by more than
1e-3. So the original model reads a text in transformers. Each of its layers, quantized, multiplies the same inputs
twice: in float64 with the values of the gguf package, and by octavo's kernel. The line of a type has the norm of the
difference divided by that of the product: the root mean square over layers, and the worst layer. `scales` is the part
that comes from rounding the scales and minimums of groups to float16; the rest comes from rows, which have 12 bits
(docs/adr/0062).

    PYTHONPATH=tests/support .venv/bin/python scripts/evaluation/layers.py --model MODEL --work DIRECTORY
"""

import argparse
from pathlib import Path

import ggml_types
import gguf
import numpy as np
import torch
from linear_products import multiply
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.frontend.evaluation.quality import fixed_text
from octavo.kernels.linear.packing import pack_quantized
from octavo.kernels.native.library import load
from octavo.worker_proc.weights.gguf_blocks import GgufMatrix

LAYERS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Layers of a block of a GGUF file, and their names in transformers. The order of inputs is the same in both."""


def main() -> None:
    """Print a line for each type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of a Llama with safetensors")
    parser.add_argument("--work", type=Path, required=True, help="directory for files, which are reused")
    parser.add_argument("--types", default=",".join(ggml_types.TYPES), help="types, separated by commas; default: all")
    parser.add_argument("--text", type=Path, help="text that the model reads; default: about a thousand words")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of the text that are read; default: 128")
    parser.add_argument("--every", type=int, default=1, metavar="BLOCKS", help="the type is in files as by formats.py")
    options = parser.parse_args()
    text = options.text.read_text() if options.text else fixed_text()
    tokens = AutoTokenizer.from_pretrained(options.model)(text)["input_ids"][: options.tokens]
    print(f"{len(tokens)} tokens of {options.model.name}; relative error of products")
    row = "{:<8} {:>10} {:>10} {:>10}".format
    print(row("type", "all", "worst", "scales"))
    inputs: dict[str, Tensor] = {}
    for kind in options.types.split(","):
        file = ggml_types.written(options.model, kind, options.work, options.every)
        inputs = inputs or inputs_of_layers(ggml_types.padded(options.model, options.work), tokens)
        errors, errors_of_scales = relative_errors(file, kind, inputs)
        print(row(kind, *(f"{value:.2e}" for value in (rms(errors), max(errors), rms(errors_of_scales)))), flush=True)


def inputs_of_layers(model: Path, tokens: list[int]) -> dict[str, Tensor]:
    """Return the inputs of each layer, float32, shape (tokens, inputs), by the name of its weight."""
    inputs = {}
    reader = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for name, layer in reader.named_modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(
                lambda _, rows, name=name: inputs.__setitem__(f"{name}.weight", rows[0][0].contiguous())
            )
    with torch.inference_mode():
        reader(torch.tensor([tokens]))
    return inputs


def relative_errors(file: Path, kind: str, inputs: dict[str, Tensor]) -> tuple[list[float], list[float]]:
    """Return the relative error of each layer of this type in a file, and the part that scales cause."""
    library = load()
    errors, errors_of_scales = [], []
    for tensor in gguf.GGUFReader(file).tensors:
        block, _, layer = tensor.name.removesuffix(".weight").removeprefix("blk.").partition(".")
        if layer not in LAYERS or tensor.tensor_type.name != kind:
            continue
        rows = inputs[f"model.layers.{block}.{LAYERS[layer]}.weight"]
        matrix = GgufMatrix(tensor.name, tensor.tensor_type, np.array(tensor.data))
        weight = matrix.quantized()
        exact = rows.double() @ matrix.dequantized().double().t()
        of_scales = rows.double() @ weight.dequantize().double().t() - exact
        ours = multiply(library, rows, pack_quantized(library, weight)).double() - exact
        errors.append(float(ours.norm() / exact.norm()))
        errors_of_scales.append(float(of_scales.norm() / exact.norm()))
    return errors, errors_of_scales


def rms(values: list[float]) -> float:
    """Return the root mean square."""
    return float(np.sqrt(np.mean(np.square(values))))


if __name__ == "__main__":
    main()
