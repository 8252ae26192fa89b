"""How far the loss of a GGUF file moves in transformers when its weights change as little as kernels change them.

`formats.py` compares octavo with transformers and shows a standard error over tokens. A change of the weights moves all
tokens together, which that error does not contain. So the reference reads the text several times: with its own weights;
with scales and minimums rounded to float16 as octavo stores them; with inputs of layers rounded to 12 bits too
(docs/adr/0062); and with random relative errors of a given size in the layers of the type. The last two explain
octavo's numbers: what remains of the difference to the reference with both roundings comes from octavo's sums.

    PYTHONPATH=tests/support .venv/bin/python scripts/evaluation/sensitivity.py --model MODEL --work DIRECTORY \
        --type IQ2_S --every 6 --text TEXT
"""

import argparse
from functools import partial
from pathlib import Path

import formats
import gguf
import numpy as np
import torch
from ggml_types import TYPES, written
from layers import LAYERS
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers_gguf import from_gguf

from octavo.frontend.evaluation.quality import fixed_text
from octavo.worker_proc.weights.gguf_blocks import GgufMatrix
from octavo.worker_proc.weights.rope_order import undo_rope_order

GROUP = 32
"""Maximum number of inputs that share a scale of rows, and the inputs that share a scale in Q8_0."""
LARGEST_LEVEL = 2047


def main() -> None:
    """Print a line for each change of the weights, and one for octavo."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of a Llama with safetensors")
    parser.add_argument("--work", type=Path, required=True, help="directory for files, which are reused")
    parser.add_argument("--type", required=True, choices=TYPES)
    parser.add_argument("--every", type=int, default=1, metavar="BLOCKS", help="see formats.py")
    parser.add_argument("--text", type=Path, help="text that the models read; default: about a thousand words")
    parser.add_argument("--size", type=float, default=2e-4, help="standard deviation of random errors; default: 2e-4")
    parser.add_argument("--draws", type=int, default=4, help="number of draws of random errors; default: 4")
    options = parser.parse_args()
    text = options.text.read_text() if options.text else fixed_text()
    tokens = AutoTokenizer.from_pretrained(options.model)(text)["input_ids"]
    file = written(options.model, options.type, options.work, options.every)
    model = from_gguf(AutoModelForCausalLM, file, dtype=torch.float32).eval().requires_grad_(False)
    exact = formats.losses_of_tokens(model, tokens)
    with formats.open_octavo(file, quantization="gguf") as llm:
        ours = formats.losses_of(formats.read_tokens(llm, tokens))
    print(f"{options.type}: {len(exact)} tokens, loss {float(exact.mean()):.4f}")
    print(f"octavo: {formats.added(ours, exact)[1]}", flush=True)
    weights, group_sizes = weights_of(model, file, options.type)
    originals = {name: weight.clone() for name, (weight, _) in weights.items()}
    for weight, stored in weights.values():
        weight.copy_(stored)
    of_scales = formats.losses_of_tokens(model, tokens)
    print(f"scales in float16: {formats.added(of_scales, exact)[1]}")
    print(f"octavo, compared with them: {formats.added(ours, of_scales)[1]}", flush=True)
    hooks = [
        layer.register_forward_pre_hook(partial(rows_of_12_bits, group_sizes.get(f"{name}.weight", GROUP)))
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    of_both = formats.losses_of_tokens(model, tokens)
    print(f"rows of 12 bits too: {formats.added(of_both, exact)[1]}")
    print(f"octavo, compared with both: {formats.added(ours, of_both)[1]}", flush=True)
    for hook in hooks:
        hook.remove()
    for draw in range(options.draws):
        generator = torch.Generator().manual_seed(draw)
        for name, (weight, _) in weights.items():
            errors = torch.randn(weight.shape, generator=generator)
            weight.copy_(originals[name] * (1 + options.size * errors))
        changed = formats.losses_of_tokens(model, tokens)
        print(f"random errors of {options.size:g}, draw {draw}: {formats.added(changed, exact)[1]}", flush=True)


def rows_of_12_bits(group_size: int, layer: nn.Module, rows: tuple[Tensor]) -> Tensor:
    """Return the inputs of a layer, rounded like the inputs of products with levels in groups."""
    groups = rows[0].unflatten(-1, (-1, group_size))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / LARGEST_LEVEL
    return ((groups / scale).round() * scale).flatten(-2)


def weights_of(model: nn.Module, file: Path, kind: str) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, int]]:
    """Return, by name, the weights of a file's layers of this type, and the inputs that share a scale of rows.

    Each weight is returned twice: its values, and its values as octavo stores them.
    """
    config = model.config
    group_sizes = {}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in gguf.GGUFReader(file).tensors:
        block, _, layer = tensor.name.removesuffix(".weight").removeprefix("blk.").partition(".")
        if layer not in LAYERS or tensor.tensor_type.name != kind:
            continue
        name = f"model.layers.{block}.{LAYERS[layer]}.weight"
        matrix = GgufMatrix(name, tensor.tensor_type, np.array(tensor.data))
        quantized = matrix.quantized()
        exact, stored = matrix.dequantized(), quantized.dequantize()
        if layer in heads:
            exact, stored = (undo_rope_order(values, heads[layer]) for values in (exact, stored))
        weight = model.get_parameter(name)
        assert torch.equal(weight, exact), f"{name} is not what transformers reads"
        weights[name] = (weight, stored)
        group_sizes[name] = min(quantized.group_size, GROUP)
    return weights, group_sizes


if __name__ == "__main__":
    main()
