"""Loss of each format of quantized weights: perplexity and top-1 agreement with the original on a fixed text.

Every format is written from one model by `octavo quantize` or the format's own tool, and read by octavo in float32 with
`--quantization`: without it float32 would stand for dequantized weights. The reference is transformers in float32 with
the dequantized weights, by the format's tool or its published formula. Its loss is what the rounding of the weights
costs; the difference to octavo's loss is what our kernels add, for example by rounding activations to 8 bits. It must
not exceed 1e-3 nats. Where a format rounds activations to 8 bits, the reference does so too, with the functions of the
format's tool. Such a reference is sensitive: a sum in another order moves a number to the next integer, and each layer
has more of them. `--with-float64` shows how far the reference moves from itself when it computes in float64. Formats
that `octavo quantize` does not write come from `tests/support/quantized_checkpoints.py`: by their tools or formulas;
the GGUF types that its package cannot write from ggml (`ggml_types.py`). A small model with one or two bits in all
layers is destroyed, and whatever moves a last bit moves its loss by more than 1e-3. `--every` gives a type to some
blocks only.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from ggml_types import TYPES as GGML_TYPES
from ggml_types import written as written_by_ggml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers_gguf import from_gguf

from octavo import LLM
from octavo.frontend.cli.quantize import do
from octavo.frontend.evaluation.quality import PIECE_TOKENS, Reading, fixed_text, read, read_tokens
from octavo.frontend.model_files.gguf.export import gguf_metadata
from octavo.protocol.quantization_job import CALIBRATED, QuantizationJob

MOST_ADDED = 1e-3
"""Maximum loss that octavo may add, in nats per token."""
GROUP = 64
"""Inputs that share a scale: SmolLM2's layers have multiples of 64 inputs, not of 128."""
GGUF_TYPES = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
EVERY = ("gptq-2",)
"""Safetensors formats that destroy a small model if all layers have them."""
AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)


def main() -> None:
    """Print a line for each format; exit with 1 if one adds too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="directory of a model with safetensors")
    parser.add_argument("--formats", help=f"of {', '.join(FORMATS)}; default: all")
    parser.add_argument("--calibration", type=Path, required=True, help="calibration text for gptq and awq")
    parser.add_argument("--work", type=Path, required=True, help="directory for checkpoints, which are reused")
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--text", type=Path, help="text that the models read; default: about a thousand words")
    parser.add_argument(
        "--in-parts",
        type=int,
        metavar="PIECES",
        help="only compare octavo with the reference, each time this many pieces have been read",
    )
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="BLOCKS",
        help="only the middle one of so many blocks has the format; others have Q8_0 in GGUF files that ggml writes, "
        "and are not quantized in other checkpoints",
    )
    parser.add_argument("--with-float64", action="store_true", help="compare the reference with itself in float64 too")
    options = parser.parse_args()
    wanted = options.formats.split(",") if options.formats else list(FORMATS)
    if options.every != 1 and (
        others := [name for name in wanted if FORMATS[name] is not by_ggml and name not in EVERY]
    ):
        parser.error(f"--every is for the GGUF types that ggml writes and for {', '.join(EVERY)}, not for {others[0]}")
    text = options.text.read_text() if options.text else fixed_text()
    if options.in_parts:
        sys.exit(compare_in_parts(options, wanted, text))
    original = octavo_reading(options.model, text)
    base = reference_losses(reference_of(options.model, None), options.model, text)
    print(f"{len(original.logprobs)} tokens of {options.model.name}; octavo and transformers, float32")
    row = "{:<22} {:>10} {:>10} {:>10} {:>20} {:>20}".format
    print(row("format", "perplexity", "agreement", "lost", "added by us", "by float64"))
    print(row("original", f"{original.perplexity:.4f}", "", "", added(losses_of(original), base)[1], ""))
    failed = []
    for name in wanted:
        path, settings = FORMATS[name](options, name)
        reading = octavo_reading(path or options.model, text, **settings)
        reference = reference_of(options.model, path, **settings)
        expected = reference_losses(reference, options.model, text)
        is_too_much, shown = added(losses_of(reading), expected)
        failed += [name] if is_too_much else []
        lost = f"{float((expected - base).mean()):+.4f}"
        own = ""
        if options.with_float64:
            own = added(reference_losses(reference.double(), options.model, text), expected)[1]
        agreement = f"{original.agreement(reading):.2%}"
        print(row(name, f"{reading.perplexity:.4f}", agreement, lost, shown, own), flush=True)
    if failed:
        sys.exit(f"more than {MOST_ADDED} nats are added by {', '.join(failed)}")


def compare_in_parts(options: argparse.Namespace, names: list[str], text: str) -> int:
    """Print for each format what octavo adds to the reference's loss, again after each part of a long text.

    Returns 1 if one of the formats adds too much.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    tokens = tokenizer(text)["input_ids"]
    size = options.in_parts * PIECE_TOKENS
    failed = 0
    for name in names:
        path, settings = FORMATS[name](options, name)
        reference = reference_of(options.model, path, **settings)
        ours, theirs = [], []
        with open_octavo(path or options.model, **settings) as llm:
            for begin in range(0, len(tokens) - 1, size):
                part = tokens[begin : begin + size]
                ours.append(losses_of(read_tokens(llm, part)))
                theirs.append(losses_of_tokens(reference, part))
                expected = torch.cat(theirs)
                is_too_much, shown = added(torch.cat(ours), expected)
                loss = f"{len(expected)} tokens, loss {float(expected.mean()):.4f}"
                print(f"{name}: {loss}, added by us {shown}", flush=True)
        failed |= is_too_much
    return failed


def losses_of(reading: Reading) -> Tensor:
    """Return the negative logprobs of a text."""
    return -torch.tensor(reading.logprobs, dtype=torch.float64)


def added(losses: Tensor, expected: Tensor) -> tuple[bool, str]:
    """Return whether a mean loss exceeds the reference's by too much, and the excess, compared token by token.

    Rounded activations change the loss of each token up or down, so the mean has a standard error, which is shown. A
    mean is too large if it exceeds the limit by more than two standard errors.
    """
    differences = losses - expected
    mean, error = float(differences.mean()), float(differences.std() / len(differences) ** 0.5)
    return mean - 2 * error > MOST_ADDED, f"{mean:+.5f} +- {error:.5f}"


def octavo_reading(path: Path, text: str, **settings: Any) -> Reading:
    """Return octavo's reading of the text in float32."""
    with open_octavo(path, **settings) as llm:
        return read(llm, text)


def open_octavo(path: Path, **settings: Any) -> LLM:
    """Return an engine that computes in float32."""
    return LLM(str(path), dtype="float32", max_model_len=2 * PIECE_TOKENS, max_num_seqs=4, **settings)


def reference_losses(model: nn.Module, original: Path, text: str) -> Tensor:
    """Return transformers' negative logprobs of the tokens that octavo counts."""
    return losses_of_tokens(model, transformers.AutoTokenizer.from_pretrained(original)(text)["input_ids"])


def losses_of_tokens(model: nn.Module, tokens: list[int]) -> Tensor:
    """Return the negative logprobs of tokens; the model reads them in pieces."""
    losses = []
    for begin in range(0, len(tokens), PIECE_TOKENS):
        piece = torch.tensor(tokens[begin : begin + PIECE_TOKENS])
        if len(piece) > 1:
            with torch.inference_mode():
                logits = model(piece.unsqueeze(0)).logits[0, :-1].double()
            losses.append(nn.functional.cross_entropy(logits, piece[1:], reduction="none"))
    return torch.cat(losses)


def reference_of(original: Path, path: Path | None, **settings: Any) -> nn.Module:
    """Return the original model in float32, with the dequantized weights of a checkpoint."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    if path is not None and path.suffix == ".gguf":
        return from_gguf(transformers.AutoModelForCausalLM, path, dtype=torch.float32).eval()
    model: nn.Module = load(original, dtype=torch.float32).eval().requires_grad_(False)
    if path is None and not settings:
        return model
    tensors = load_file(path / "model.safetensors") if path else {}
    config = json.loads((path / "config.json").read_text())["quantization_config"] if path else settings
    values = load_file(values_file(path)) if path and values_file(path).exists() else {}
    rounding = rounding_of_rows(config, path)
    for name, layer in model.named_modules():
        # `--quantization` at load also quantizes the output layer, with w8a8 in groups of 32.
        if isinstance(layer, nn.Linear) and (name != "lm_head" or path is None):
            known = values.get(f"{name}.weight", layer.weight if values else None)
            weight = dequantized(name, layer.weight, tensors, config) if known is None else known
            layer.weight = nn.Parameter(weight, requires_grad=False)
            if rounding is not None and name != "lm_head":
                layer.register_forward_pre_hook(partial(rounded, rounding))
    for name, values in tensors.items():  # norms that AWQ has rescaled
        if name.endswith("norm.weight"):
            model.get_parameter(name).copy_(values)
    return model


def dequantized(name: str, weight: Tensor, tensors: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """Return the weight of a layer by the formula of its format."""
    own = {part.removeprefix(f"{name}."): values for part, values in tensors.items() if part.startswith(f"{name}.")}
    method = config.get("quant_method", config.get("quantization"))
    if method == "gptq":
        group = own["g_idx"].long()
        levels, zeros = nibbles(own["qweight"].T).T, nibbles(own["qzeros"]) + 1 & 15
        return ((levels - zeros[group]) * own["scales"].float()[group]).T
    if method == "awq":
        levels, zeros = (
            nibbles(own[part]).unflatten(1, (-1, 8))[..., list(AWQ_COLUMNS)].flatten(1)
            for part in ("qweight", "qzeros")
        )
        distances = levels - zeros.repeat_interleave(GROUP, 0)
        return (distances * own["scales"].float().repeat_interleave(GROUP, 0)).T
    if "weight_packed" in own:
        scale = own["weight_scale"].float().repeat_interleave(GROUP, 1)
        return (nibbles(own["weight_packed"]) - 8) * scale
    if "weight_scale" in own:
        return own["weight"].float() * own["weight_scale"].float()
    if method == "bitsandbytes":
        return bitsandbytes_values(own, weight)
    return ours(weight, "int8" if name == "lm_head" and method == "w8a8" else method)


def rounding_of_rows(config: dict[str, Any], path: Path | None) -> Callable[[Tensor], Tensor] | None:
    """Return a function that rounds the inputs of quantized layers; `None` if they are not rounded, or only on GPUs."""
    if config.get("format") == "int-quantized":
        return rounded_by_compressed_tensors
    if path is not None and path.name == "torchao-int8-dynamic":
        return rounded_by_torchao
    return rounded_by_compressed_tensors if config.get("quantization") == "w8a8" else None


def rounded(rounding: Callable[[Tensor], Tensor], layer: nn.Module, rows: tuple[Tensor]) -> Tensor:
    """Return the rounded inputs of a layer."""
    return rounding(rows[0])


def rounded_by_compressed_tensors(rows: Tensor) -> Tensor:
    """Round like a layer that compressed-tensors has not compressed yet."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    args = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
    return fake_quantize(rows, *compute_dynamic_scales_and_zp(rows, args, nn.Module()), args)


def rounded_by_torchao(rows: Tensor) -> Tensor:
    """Round like torchao's linear layers."""
    from torchao.quantization import Int8Tensor, PerRow

    return Int8Tensor.from_hp(rows.flatten(0, -2).float(), PerRow()).dequantize().view(rows.shape).to(rows.dtype)


def nibbles(words: Tensor) -> Tensor:
    """Return the levels in the last dimension of int32 words, the lowest four bits first."""
    return torch.stack([words >> shift & 15 for shift in range(0, 32, 4)], -1).flatten(-2)


def bitsandbytes_values(own: dict[str, Tensor], weight: Tensor) -> Tensor:
    """Return the values, dequantized by the functions of bitsandbytes."""
    from bitsandbytes import functional

    if "SCB" in own:
        return own["weight"].float() * own["SCB"].float().unsqueeze(1) / 127
    state = {part: values for part, values in own.items() if part != "weight"}
    quantized = functional.QuantState.from_dict(state, device=torch.device("cpu"))
    return functional.dequantize_4bit(own["weight"], quantized).float().view(weight.shape)


def ours(weight: Tensor, quantization: str) -> Tensor:
    """Return the values of a weight that octavo quantizes at load, in groups of 32."""
    from octavo.kernels.linear.quantization import quantize_weight
    from octavo.kernels.native.library import load

    return quantize_weight(load(), weight.bfloat16().contiguous(), quantization).dequantize()  # type: ignore[arg-type]


def by_octavo(options: argparse.Namespace, name: str) -> tuple[Path, dict[str, Any]]:
    """Return a checkpoint that `octavo quantize` writes."""
    kind, _, gguf_type = name.partition(" ")
    out = options.work / (f"{gguf_type}.gguf" if gguf_type else kind)
    if not out.exists():
        job = QuantizationJob(
            source=str(options.model),
            out=str(out),
            format=kind,  # type: ignore[arg-type]
            group_size=GROUP,
            calibration=str(options.calibration) if kind in CALIBRATED else None,
            num_samples=options.num_samples,
            gguf_type=gguf_type or "Q8_0",  # type: ignore[arg-type]
            gguf_metadata=gguf_metadata(options.model) if gguf_type else {},
        )
        do(job)
    return out, {"quantization": "gguf" if gguf_type else kind if kind in CALIBRATED else "compressed-tensors"}


def by_ggml(options: argparse.Namespace, name: str) -> tuple[Path, dict[str, Any]]:
    """Return a GGUF file that ggml writes."""
    return written_by_ggml(options.model, name.partition(" ")[2], options.work, options.every), {"quantization": "gguf"}


def by_bitsandbytes(options: argparse.Namespace, name: str) -> tuple[Path, dict[str, Any]]:
    """Return a checkpoint that transformers writes with bitsandbytes, in a separate process."""
    kind = name.partition(" ")[2]
    out = options.work / kind
    if not out.exists():
        settings = "load_in_8bit=True" if kind == "int8" else f"load_in_4bit=True, bnb_4bit_quant_type={kind!r}"
        code = (
            "import transformers as t; m = t.AutoModelForCausalLM.from_pretrained("
            f"{str(options.model)!r}, quantization_config=t.BitsAndBytesConfig({settings}), device_map='cpu'); "
            f"m.save_pretrained({str(out)!r}); "
            f"t.AutoTokenizer.from_pretrained({str(options.model)!r}).save_pretrained({str(out)!r})"
        )
        subprocess.run([sys.executable, "-P", "-W", "ignore", "-c", code], check=True)
    return out, {"quantization": "bitsandbytes"}


def values_file(path: Path) -> Path:
    """Return the path of the values of a checkpoint that `by_tool` has written."""
    return path.with_name(f"{path.name}-values.safetensors")


def by_tool(options: argparse.Namespace, name: str) -> tuple[Path, dict[str, Any]]:
    """Return a checkpoint written by the format's tool or formula; store its values next to it."""
    from quantized_checkpoints import write

    def is_wanted(layer: str) -> bool:
        block = re.search(r"\.layers\.(\d+)\.", layer)
        return block is not None and int(block[1]) % options.every == options.every // 2

    out = options.work / (name if options.every == 1 else f"{name}-every-{options.every}")
    if not values_file(out).exists():
        shutil.rmtree(out, ignore_errors=True)
        save_file(
            {part: values.contiguous() for part, values in write(name, options.model, out, is_wanted).items()},
            values_file(out),
        )
        for file in options.model.glob("*token*"):
            shutil.copy(file, out)
    method = json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"]
    return out, {"quantization": method}


def at_load(options: argparse.Namespace, name: str) -> tuple[None, dict[str, Any]]:
    """Return the flag with which octavo quantizes the original while it loads."""
    return None, {"quantization": name.partition("=")[2]}


FORMATS: dict[str, Callable[[argparse.Namespace, str], tuple[Path | None, dict[str, Any]]]] = {
    **dict.fromkeys(("int8", "int4", "fp8", "gptq", "awq"), by_octavo),
    **{f"gguf {kind}": by_octavo for kind in GGUF_TYPES},
    **{f"gguf {kind}": by_ggml for kind in GGML_TYPES},
    **dict.fromkeys(("bitsandbytes nf4", "bitsandbytes fp4", "bitsandbytes int8"), by_bitsandbytes),
    **dict.fromkeys(("nvfp4", "mxfp4", "mxfp8", "fp8-tensor", "fp8-blocks", "w8a8-float"), by_tool),
    **dict.fromkeys(("torchao-int8", "torchao-int8-dynamic", "torchao-float8"), by_tool),
    **dict.fromkeys(("gptq-act-order", "gptq-asymmetric", "gptq-2", "gptq-3", "gptq-8"), by_tool),
    **dict.fromkeys(("w4a16-asymmetric", "w4a16-channel", "w8a16", "fp4-nested"), by_tool),
    **dict.fromkeys(("--quantization=int8", "--quantization=int4", "--quantization=w8a8"), at_load),
}

if __name__ == "__main__":
    main()
