"""The process that touches the GPU for `cuda.CudaGpu`: ceilings, attention alone, and steps of a model in process."""

from typing import Any

import torch
import triton

from bench_gpu_parts import kernels
from bench_gpu_parts.callee import serve
from bench_gpu_parts.machine import AttentionCase, KernelName
from bench_gpu_parts.steps import StepRunner

_runners: list[StepRunner] = []


def facts() -> dict[str, Any]:
    """Return the GPU's name and memory, and what computes on it."""
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton.__version__}"
    _, total_bytes = torch.cuda.mem_get_info()
    return {"name": f"{torch.cuda.get_device_name()}, {versions}", "total_bytes": total_bytes}


def attention(kernel: KernelName, **case: int) -> float:
    """Return the seconds of one layer's attention."""
    return kernels.attention(kernel, AttentionCase(**case))


def open_steps(model: str, max_tokens: int, max_batch: int) -> None:
    """Load the model whose steps are measured."""
    _runners.append(StepRunner(model, "cuda", max_tokens=max_tokens, max_batch=max_batch))


def step(batch: int, context: int, num_tokens: int, asks_busy: bool) -> tuple[float, float | None]:
    """Return the seconds of a step, and how long the GPU computes in it."""
    return _runners[-1].step(batch, context, num_tokens, asks_busy=asks_busy)


if __name__ == "__main__":
    serve({function.__name__: function for function in (facts, kernels.ceilings, attention, open_steps, step)})
