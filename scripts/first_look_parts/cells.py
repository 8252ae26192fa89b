"""The cells that the first minutes on a GPU measure, most important first. Measures nothing itself.

A cell is one call of a function in `drive.py`, in a process that can be killed without losing other cells.
"""

from dataclasses import dataclass
from typing import Any, Literal

from bench_gpu_parts.mixtures import MixtureName
from bench_gpu_parts.quantized import ROWS as QUANTIZED_ROWS
from bench_gpu_parts.quantized import QuantizedName
from bench_gpu_parts.recurrences import RECURRENCES, RecurrenceName
from bench_gpu_parts.shapes import SHAPES, ShapeName, weight_shapes
from bench_gpu_parts.towers import TOWER_RUNS, TOWERS, TowerRunName

TOTAL_S = 420.0
ROWS = (1, 16, 64, 256, 2048, 8192)
MAX_HEAD_ROWS = 256
"""Maximum number of rows of the output layer: only sampled rows are multiplied with it."""
ATTENTION = ((1, 8192, 8192), (1, 2048, 2048), (1, 32768, 32768), (64, 1024, 1), (64, 8192, 1), (1, 8192, 1))
"""Number of requests, tokens of each, and how many of the tokens are computed."""
MODELS: tuple[ShapeName, ...] = ("Qwen3-0.6B", "Llama-3.1-8B")
TEMPERATURE: dict[str, Any] = {"temperature": 0.6}
FILTERED: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
"""Sampling defaults of Qwen3's generation config."""
REPORTED: dict[str, Any] = {"temperature": 0.6, "logprobs": 20}

TP_INVARIANT: dict[str, Any] = {"shape": "Llama-3.1-8B", "rows": [1, 64, 2048]}
SUMS: dict[str, Any] = {"width": 4096, "rows": [1, 8, 16, 64, 128]}

Group = Literal["kernels", "early", "small", "large", "engine"]
"""Cells of a group share a process while none of them fails."""


@dataclass(frozen=True)
class Cell:
    """One measurement, or a few related ones."""

    key: str
    title: str
    group: Group
    function: str
    """Name of a function in `drive.py`."""
    arguments: dict[str, Any]
    expected_s: float
    """Expected time on an H200 in seconds."""
    limit_s: float
    """Time in seconds after which the process is killed."""


def all_cells() -> list[Cell]:
    """Return the cells in their order."""
    return [
        Cell("environment", "the machine", "kernels", "environment", {}, 1, 30),
        Cell("ceilings", "the GPU's ceilings", "kernels", "ceilings", {}, 3, 30),
        *(_tower_attention(name) for name in TOWER_RUNS),
        *(
            Cell(f"tower-of-{name}", f"a whole tower, {name}", "kernels", "tower", {"name": name}, 14, 70)
            for name in TOWERS
        ),
        *(_agree(model, name) for model in MODELS for name in weight_shapes(SHAPES[model])),
        Cell("bits-attention", "the bits of a position, attention alone", "kernels", "attention_bits", {}, 8, 40),
        _sinks(),
        *(_products(model, name) for model in MODELS for name in weight_shapes(SHAPES[model])),
        _quantized("GPTQ"),  # scripts/bench_gpu measures all formats
        _mixture("Qwen3-30B-A3B"),
        _mixture("GPT-OSS-20B", "mxfp4"),  # the published format
        *(_recurrence(name) for name in RECURRENCES),
        Cell("bits-tp", "the bits of products that ranks divide", "kernels", "tp_invariant", TP_INVARIANT, 20, 60),
        Cell("sums", "sums over several GPUs", "kernels", "sums", SUMS, 20, 90),
        *(_attention(*case) for case in ATTENTION),
        _attention(64, 4352, 1, num_shared=4096),
        *(_latent(num_heads) for num_heads in (16, 128)),
        *(_early(weights) for weights in (None, "GPTQ")),
        Cell("bits-model", "the bits of a position, a model", "small", "model_bits", _model("Qwen3-0.6B"), 25, 60),
        *_decode("Qwen3-0.6B", "small"),
        Cell("mixed-Qwen3-0.6B", "decodes beside a prompt", "small", "mixed", _model("Qwen3-0.6B"), 4, 30),
        Cell("drafts", "steps that draft", "small", "drafts", _model("Qwen3-0.6B"), 20, 60),
        *_decode("Llama-3.1-8B", "large"),
        Cell("engine", "three processes, end to end", "engine", "serve", _model("Qwen3-0.6B"), 55, 110),
    ]


def _model(shape: ShapeName) -> dict[str, Any]:
    return {"shape": shape}


def _agree(model: ShapeName, name: str) -> Cell:
    outputs, inputs = weight_shapes(SHAPES[model])[name]
    title = f"row counts of cuBLAS that agree, {model} {name}"
    arguments = {"name": f"{model} {name}", "num_outputs": outputs, "num_inputs": inputs}
    return Cell(f"agree-{model}-{name}", title, "kernels", "agreeing_rows", arguments, 1.5, 20)


def _products(model: ShapeName, name: str) -> Cell:
    outputs, inputs = weight_shapes(SHAPES[model])[name]
    rows = [count for count in ROWS if name != "head" or count <= MAX_HEAD_ROWS]
    arguments = {"name": f"{model} {name}", "num_outputs": outputs, "num_inputs": inputs, "rows": rows}
    return Cell(f"products-{model}-{name}", f"products, {model} {name}", "kernels", "products", arguments, 4, 30)


def _sinks() -> Cell:
    title = "the bits of a position, attention with sinks and a window"
    return Cell("bits-attention-sinks", title, "kernels", "attention_bits", {"has_sinks": True}, 6, 40)


def _mixture(name: MixtureName, form: QuantizedName | None = None) -> Cell:
    arguments = {"name": name, "rows": list(ROWS), "form": form}
    title = f"{name}, {form}" if form else name
    key = f"experts-{name}-{form}" if form else f"experts-{name}"
    return Cell(key, f"experts of a layer, {title}", "kernels", "mixture", arguments, 5, 40)


def _quantized(name: QuantizedName) -> Cell:
    arguments = {"name": name, "rows": list(QUANTIZED_ROWS)}
    return Cell(f"quantized-{name}", f"products of a layer, {name}", "kernels", "quantized", arguments, 2, 25)


def _early(weights: QuantizedName | None) -> Cell:
    arguments = {"shape": "Llama-3.1-8B", "rows": [16, 64], "weights": weights}
    key, title = ("early", "") if weights is None else (f"early-{weights}", f", {weights}")
    return Cell(key, f"launches before the kernel ahead ends{title}", "early", "early_launches", arguments, 4, 40)


def _recurrence(name: RecurrenceName) -> Cell:
    arguments = {"name": name, "steps": [[1, 1], [64, 1], [256, 1], [1, 2048], [4, 2048]]}
    return Cell(f"state-{name}", f"recurrence of a layer, {name}", "kernels", "recurrence", arguments, 4, 40)


def _attention(batch: int, context: int, num_tokens: int, num_shared: int = 0) -> Cell:
    title = f"attention, {batch} x {context}" if num_tokens == 1 else f"attention, prefill of {num_tokens}"
    arguments = {"batch": batch, "context": context, "num_tokens": num_tokens}
    if num_shared:
        title, arguments = f"{title}, of which {num_shared} shared", arguments | {"num_shared": num_shared}
    return Cell(f"attention-{batch}-{context}-{num_tokens}", title, "kernels", "attention", arguments, 3, 25)


def _tower_attention(name: TowerRunName) -> Cell:
    title = f"attention of a tower, {name}"
    return Cell(f"tower-{name}", title, "kernels", "tower_attention", {"name": name}, 2, 25)


def _latent(num_heads: int) -> Cell:
    title = f"latent attention, {num_heads} heads"
    return Cell(f"latent-{num_heads}", title, "kernels", "latent_attention", {"num_heads": num_heads}, 6, 40)


def _decode(shape: ShapeName, group: Group) -> list[Cell]:
    """Return decode steps with each kind of sampling; the first cell loads the model unless it is already loaded."""
    samplings = {"temperature": TEMPERATURE, "top-k and top-p": FILTERED}
    if group == "small":
        samplings["20 logprobs"] = REPORTED
    return [
        Cell(
            f"decode-{shape}-{name}",
            f"decode of 64 x 1k, {shape}, {name}",
            group,
            "decode",
            {"shape": shape, "name": name, "sampling": sampling, "batch": 64, "context": 1024},
            22 if group == "large" and name == "temperature" else 5,
            60,
        )
        for name, sampling in samplings.items()
    ]
