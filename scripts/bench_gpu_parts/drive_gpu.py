"""The process that uses the GPU for `cuda.CudaGpu`: ceilings, attention alone, and steps of a model in process."""

import asyncio
from pathlib import Path
from typing import Any

import torch
import triton

from bench_gpu_parts import kernels, serving
from bench_gpu_parts.callee import serve
from bench_gpu_parts.machine import AttentionCase, KernelName, Sampling
from bench_gpu_parts.quantized import QuantizedName
from bench_gpu_parts.quantized_layers import Layer
from bench_gpu_parts.steps import StepRunner
from bench_gpu_parts.workloads import Load

_runners: list[StepRunner] = []


def facts() -> dict[str, Any]:
    """Return the GPU's name and memory, and the versions of the software on it."""
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton.__version__}"
    _, total_bytes = torch.cuda.mem_get_info()
    return {"name": f"{torch.cuda.get_device_name()}, {versions}", "total_bytes": total_bytes}


def attention(kernel: KernelName, **case: int) -> float:
    """Return the seconds of one layer's attention."""
    return kernels.attention(kernel, AttentionCase(**case))


def quantized_layer(name: QuantizedName, num_rows: int) -> float:
    """Return the seconds of a layer's products with quantized weights."""
    with torch.inference_mode():
        return Layer(name).seconds(num_rows)


def open_steps(model: str, max_tokens: int, max_batch: int, settings: dict[str, Any]) -> None:
    """Load the model for measurements of steps."""
    _runners.append(StepRunner(model, "cuda", max_tokens=max_tokens, max_batch=max_batch, settings=settings))


def step(
    batch: int, context: int, num_tokens: int, asks_busy: bool, sampling: Sampling | None
) -> tuple[float, float | None]:
    """Return the seconds of a step, and how long the GPU computes in it."""
    return _runners[-1].step(batch, context, num_tokens, asks_busy=asks_busy, sampling=sampling)


def mixed_step(batch: int, context: int, chunk: int) -> tuple[float, float | None]:
    """Return the seconds of a step with decodes and a prompt chunk, and how long the GPU computes in it."""
    return _runners[-1].mixed_step(batch, context, chunk, asks_busy=True)


def serve_load(model: str, settings: dict[str, Any], load: dict[str, Any], traces: str) -> dict[str, Any]:
    """Return latencies and throughput of a load, and the fraction of time in which the GPU is idle."""
    found = asyncio.run(serving.measure(Path(model), settings, Load(**load), Path(traces)))
    return {
        "output_tokens_per_s": found["output_tokens_per_s"],
        "ttft_p99_s": found["ttft_s"]["p99"],
        "itl_median_s": found["itl_s"]["median"],
        "itl_p99_s": found["itl_s"]["p99"],
        "idle_share": serving.idle_share(Path(traces)),
    }


STEP_FUNCTIONS = (open_steps, step, mixed_step, serve_load)

if __name__ == "__main__":
    serve(
        {
            function.__name__: function
            for function in (facts, kernels.ceilings, attention, quantized_layer, *STEP_FUNCTIONS)
        }
    )
