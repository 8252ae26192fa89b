"""The process that measures cells for scripts/gpu_first_look: a function for each kind of cell.

On a machine without a GPU, for dry runs, the same functions compute tiny cases: kernels in Triton's interpreter, models
and engines on the CPU.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton
from bench_gpu_parts import kernels, serving
from bench_gpu_parts.callee import serve as serve_calls
from bench_gpu_parts.machine import MIXED_CHUNKS, AttentionCase, Sampling
from bench_gpu_parts.quantized import QuantizedName
from bench_gpu_parts.shapes import SHAPES, TINY, ShapeName, weight_shapes, write_model
from bench_gpu_parts.steps import StepRunner
from bench_gpu_parts.timing import DEVICE, IS_ON_GPU
from bench_gpu_parts.workloads import Load
from gpu_attention_estimates import estimate_prefill
from gpu_decode_estimates import estimate_decode

from first_look_parts import bits, early, latent, mixtures, products, quantized, ranks, recurrences, towers
from first_look_parts.figures import cell_result, figure
from octavo.worker_proc.device.cuda import prepare_products

MAX_SHOWN_KERNELS = 14
BITS_PROMPT, BITS_OUTPUTS, BITS_COMPANY = 400, 40, 40
MAX_SEQS, MAX_MODEL_LEN = 64, 2048
MIXED = 64, 1024, 512
"""Decodes, their tokens, and the tokens of the chunk in their step, as in scripts/bench_gpu under the same key."""
NUM_DRAFTS = 3
BENCH_PREFILL = 8192
"""Tokens of the prompt that scripts/bench_gpu measures under the same key."""

_runners: dict[str, StepRunner] = {}


def environment() -> dict[str, Any]:
    """Return the environment that the numbers depend on: GPU, driver, versions, clocks."""
    detail: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version}
    if IS_ON_GPU:
        properties = torch.cuda.get_device_properties(DEVICE)
        query = "driver_version,clocks.sm,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"
        asked = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        detail |= {
            "gpu": properties.name,
            "capability": [properties.major, properties.minor],
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cache_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nvidia-smi": subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip(),
        }
    lines = [f"{key}: {value}" for key, value in detail.items()]
    return cell_result([], detail, lines)


def ceilings() -> dict[str, Any]:
    """Return the ceilings, to which percentages refer."""
    found = kernels.ceilings() if IS_ON_GPU else kernels.ceilings(copy_bytes=1 << 20, matrix_size=64)
    copy, matrix = found["copy_bytes"], found["matrix_flops"]
    figures = [
        figure("copy", "ceiling: copy within the GPU", "GB/s", copy / 1e9, digits=0, is_higher_better=True),
        figure("matrix", "ceiling: bfloat16 products", "TFLOP/s", matrix / 1e12, digits=0, is_higher_better=True),
    ]
    return cell_result(figures, found)


def agreeing_rows(**weight: Any) -> dict[str, Any]:
    """Return the row counts for which cuBLAS gives the same bits, for a weight."""
    return products.agreeing_rows(**_tiny(weight, num_outputs=32, num_inputs=64))


def measure_products(**weight: Any) -> dict[str, Any]:
    """Return the times of a product."""
    return products.products(**_tiny(weight, num_outputs=32, num_inputs=64, rows=[1, 16]))


def attention_bits(has_sinks: bool = False) -> dict[str, Any]:
    """Return whether attention gives a position the same bits in every step; with attention sinks, like GPT-OSS."""
    heads = ((64, 8, 64) if has_sinks else (32, 8, 128)) if IS_ON_GPU else (2, 1, 16)
    length, num_decodes = (5000, 97) if IS_ON_GPU else (70, 3)
    return bits.attention_bits(length, num_decodes, *heads, window=128 if has_sinks else None, has_sinks=has_sinks)


def latent_attention(num_heads: int) -> dict[str, Any]:
    """Return the times and bits of latent attention, like DeepSeek's."""
    return latent.latent_attention(num_heads, is_tiny=not IS_ON_GPU)


def mixture(**layer: Any) -> dict[str, Any]:
    """Return the times of the experts of a layer, and whether the bits of a token depend on its batch."""
    return mixtures.mixture(**_tiny(layer, rows=[1, 3]))


def quantized_products(**layer: Any) -> dict[str, Any]:
    """Return the times of a layer's products with quantized weights, and whether a row's bits depend on its batch."""
    return quantized.quantized(**_tiny(layer, rows=[1, 3]))


def recurrence(**layer: Any) -> dict[str, Any]:
    """Return the times of the recurrence of a layer, and whether the bits of a request depend on chunks or batch."""
    return recurrences.recurrence(**_tiny(layer, steps=[[2, 1], [1, 3]]))


def attention(batch: int, context: int, num_tokens: int, num_shared: int = 0) -> dict[str, Any]:
    """Return the time of one layer's attention by our kernel, and by torch where it computes the same."""
    case = AttentionCase(batch, context, num_tokens, num_shared=num_shared)
    if not IS_ON_GPU:
        num_keys, shared = (300, 256) if num_shared else (20, 0)
        computed = num_keys if num_tokens > 1 else 1
        case = AttentionCase(3, num_keys, computed, num_heads=2, num_kv_heads=1, head_dim=16, num_shared=shared)
    num_keys = case.batch * (case.context - case.num_shared) + case.num_shared
    kv_bytes = 2 * 2 * num_keys * case.num_kv_heads * case.head_dim
    pairs = case.batch * case.context * ((case.context + 1) / 2 if num_tokens > 1 else 1)
    bound = [(kv_bytes, 4.0 * case.num_heads * case.head_dim * pairs)]
    key = f"attention-{batch}-{context}"
    if num_tokens > 1:
        key = "attention-prefill" if num_tokens == BENCH_PREFILL else f"attention-prefill-{num_tokens}"
    title = f"attention, prefill of {context}" if num_tokens > 1 else f"attention, decode, {batch} x {context}"
    title += f", of which {num_shared} shared" if num_shared else ""
    heads, name = (case.num_heads, case.num_kv_heads), products.device_name()
    if num_tokens > 1:
        estimated_s = estimate_prefill(case.num_tokens, *heads, name).seconds
    else:
        estimated_s = estimate_decode(case.batch, case.context, case.num_shared, *heads, name).seconds
    figures = [figure(key, title, "us", 1e6 * estimated_s, column="estimate")]
    for column in ("octavo", "sdpa") if IS_ON_GPU and not num_shared else ("octavo",):
        spent_s = kernels.attention(column, case)  # type: ignore[arg-type]
        figures.append(figure(key, title, "us", 1e6 * spent_s, column=column, seconds=spent_s, bound=bound))
    return cell_result(figures, asdict(case))


def early_launches(shape: ShapeName, rows: list[int], weights: QuantizedName | None) -> dict[str, Any]:
    """Return the time that early launches save, and whether the bits are unchanged."""
    return early.early_launches(shape, rows if IS_ON_GPU else [1, 3], weights)


def tp_invariant(shape: ShapeName, rows: list[int]) -> dict[str, Any]:
    """Return whether products have the same bits on any number of ranks, and the cost of that."""
    return ranks.tp_invariant(shape, rows if IS_ON_GPU else [1, 3])


def model_bits(shape: ShapeName) -> dict[str, Any]:
    """Return whether a model gives a position the same bits in every step."""
    sizes = (BITS_PROMPT, BITS_OUTPUTS, BITS_COMPANY) if IS_ON_GPU else (20, 4, 3)
    return bits.model_bits(_runner(shape), *sizes)


def decode(shape: ShapeName, name: str, sampling: Sampling, batch: int, context: int) -> dict[str, Any]:
    """Return the time of a decode step, and its longest kernels."""
    if not IS_ON_GPU:
        batch, context = 2, 16
    step_s, by_kernel = _runner(shape).profile(batch, context, sampling)
    busy_s = sum(spent_s for _, spent_s, _ in by_kernel)
    config = SHAPES[shape] if IS_ON_GPU else TINY
    title = f"decode, {shape}, {batch} x {context}"
    key = f"decode-{shape}-{batch}-{context}"
    if name != "temperature":
        title, key = f"{title}, {name}", f"{key}-{name}"
    figures = [
        figure(key, title, "ms", 1e3 * step_s, seconds=step_s, bound=_step_bound(config, batch, context), digits=2)
    ]
    if IS_ON_GPU:
        idle = 100 * max(0.0, 1 - busy_s / step_s)
        figures.append(figure(f"idle-{key}", f"GPU idle, {title}", "%", idle))
    lines = [f"{title}: {1e3 * step_s:.2f} ms, of which kernels {1e3 * busy_s:.2f} ms"]
    lines += [
        f"  {1e6 * spent_s:9.1f} us {100 * spent_s / busy_s:5.1f} % {count:6.1f} x  {kernel[:80]}"
        for kernel, spent_s, count in by_kernel[:MAX_SHOWN_KERNELS]
    ]
    return cell_result(figures, [list(kernel) for kernel in by_kernel], lines)


def mixed(shape: ShapeName) -> dict[str, Any]:
    """Return the time of a step with decodes and a prompt chunk, and how long the GPU waits in it."""
    batch, context, chunk = MIXED if IS_ON_GPU else (2, 16, 2)
    step_s, busy_s = _runner(shape).mixed_step(batch, context, chunk, asks_busy=True)
    assert busy_s is not None
    title = f"{shape}, {batch} x {context} and a chunk of {chunk}"
    figures = [figure(f"mixed-{shape}", f"mixed step, {title}", "ms", 1e3 * step_s, digits=2)]
    if IS_ON_GPU:
        idle = 100 * max(0.0, 1 - busy_s / step_s)
        figures.append(figure(f"mixed-idle-{shape}", f"GPU idle, {title}", "%", idle))
    return cell_result(figures, {"step_s": step_s, "busy_s": busy_s})


def drafts(shape: ShapeName) -> dict[str, Any]:
    """Return the time of steps that draft, with the host waiting once and with the host waiting for each draft.

    A model drafts for itself: a draft takes as long as a step without the host.
    """
    directory = Path(tempfile.mkdtemp(prefix="first-look-"))
    model = str(write_model(SHAPES[shape] if IS_ON_GPU else TINY, directory))
    settings: dict[str, Any] = {"max_model_len": 2048} if IS_ON_GPU else {"max_model_len": 256, "dtype": "float32"}
    settings |= {} if IS_ON_GPU else {"cpu_kernels": "torch"}
    settings["speculative_config"] = {"method": "draft_model", "model": model, "num_speculative_tokens": NUM_DRAFTS}
    context, batches = (1024, (1, 16)) if IS_ON_GPU else (16, (2,))
    sizes = {"max_tokens": batches[-1] * context, "max_batch": batches[-1]}
    runner = StepRunner(model, "cuda" if IS_ON_GPU else "cpu", **sizes, settings=settings)
    figures, detail = [], {}
    for batch in batches:
        title = f"decode, {shape}, {batch} x {context}"
        for num, waits in ((0, False), (NUM_DRAFTS, False), (NUM_DRAFTS, True)):
            step_s = runner.drafting_step(batch, context, num, waits_each_time=waits)
            key, column = f"drafts-{batch}-{num}", "octavo, waiting" if waits else "octavo"
            detail[f"{key}, {column}"] = step_s
            figures.append(figure(key, f"{title}, {num} drafts", "ms", 1e3 * step_s, column=column, digits=2))
    return cell_result(figures, detail)


def serve(shape: ShapeName) -> dict[str, Any]:
    """Return latencies and throughput through the three processes."""
    directory = Path(tempfile.mkdtemp(prefix="first-look-"))
    model = write_model(SHAPES[shape] if IS_ON_GPU else TINY, directory / "model")
    settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
    if IS_ON_GPU:
        settings |= {"device": "cuda", "max_num_seqs": 128, "max_model_len": MAX_MODEL_LEN}
        load = Load(192, 1024, 128, 32.0, 30_000, {"temperature": 0.6, "top_k": 20, "top_p": 0.95})
    else:
        settings |= {"device": "cpu", "cpu_kernels": "torch", "max_num_seqs": 4, "max_model_len": 64}
        settings |= {"kv_cache_memory_bytes": 16 << 20}
        load = Load(4, 16, 4, 100.0, 500, {"temperature": 0.6})
    traces = directory / "traces" if IS_ON_GPU else None
    found = asyncio.run(serving.measure(model, settings, load, traces))
    title = f"{shape}, {load.num_requests} requests of {load.input_len}, {load.rate:.0f} per second"
    figures = [
        figure("engine-rate", title, "output tok/s", found["output_tokens_per_s"], digits=0, is_higher_better=True)
    ]
    for name, spoken in (("ttft_s", "first token"), ("itl_s", "gap between tokens")):
        for rank in ("median", "p90", "p99"):
            value = 1e3 * found[name][rank]
            figures.append(figure(f"engine-{name}-{rank}", f"{spoken}, {rank}", "ms", value, digits=2))
    if traces is not None:
        idle = 100 * serving.idle_share(traces)
        figures.append(figure("engine-idle", "GPU idle under this load", "%", idle))
    return cell_result(figures, found)


def _tiny(arguments: dict[str, Any], **smaller: Any) -> dict[str, Any]:
    return arguments if IS_ON_GPU else {**arguments, **{key: smaller[key] for key in smaller.keys() & arguments.keys()}}


def _runner(shape: ShapeName) -> StepRunner:
    """Return the runner of a model; it lives until this process ends."""
    if shape not in _runners:
        directory = Path(tempfile.mkdtemp(prefix="first-look-"))
        model = write_model(SHAPES[shape] if IS_ON_GPU else TINY, directory)
        if IS_ON_GPU:
            prompt_len = MIXED_CHUNKS * MIXED[-1]
            settings = {"max_model_len": prompt_len, "enable_deterministic_inference": True}
            max_tokens, max_batch = MAX_SEQS * 1024 + prompt_len, MAX_SEQS + 1
            _runners[shape] = StepRunner(
                str(model), "cuda", max_tokens=max_tokens, max_batch=max_batch, settings=settings
            )
        else:
            settings = {"max_model_len": 256, "dtype": "float32", "cpu_kernels": "torch"}
            _runners[shape] = StepRunner(str(model), "cpu", max_tokens=4 * 32, max_batch=4, settings=settings)
    return _runners[shape]


def _step_bound(config: dict[str, Any], batch: int, context: int) -> list[tuple[float, float]]:
    """Return the minimum work of a decode step: all weights once, then all keys and values once."""
    shapes = weight_shapes(config)
    head = shapes.pop("head")
    weights = config["num_hidden_layers"] * sum(rows * width for rows, width in shapes.values()) + head[0] * head[1]
    kv_bytes = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * batch * context
    return [(2.0 * weights, 2.0 * batch * weights), (kv_bytes, 0.0)]


FUNCTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "environment": environment,
    "ceilings": ceilings,
    "agreeing_rows": agreeing_rows,
    "products": measure_products,
    "mixture": mixture,
    "quantized": quantized_products,
    "recurrence": recurrence,
    "tower_attention": towers.tower_attention,
    "tower": towers.tower,
    "attention_bits": attention_bits,
    "attention": attention,
    "latent_attention": latent_attention,
    "tp_invariant": tp_invariant,
    "sums": ranks.sums,
    "early_launches": early_launches,
    "model_bits": model_bits,
    "decode": decode,
    "mixed": mixed,
    "drafts": drafts,
    "serve": serve,
}


if __name__ == "__main__":
    if IS_ON_GPU:
        prepare_products(is_deterministic=True)
    if os.environ.get("TRITON_INTERPRET") == "1":
        import triton_interpreter

        triton_interpreter.repair()
    serve_calls(FUNCTIONS)
