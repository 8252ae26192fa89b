"""A fake GPU: every measurement is a fixed multiple of the minimum time. For tests and `--dry-run`."""

from collections.abc import Iterator
from contextlib import contextmanager

from bench_cpu_parts.roofline import ModelCost
from bench_cpu_parts.session import EngineFailure
from bench_cpu_parts.workloads import Workload

from bench_gpu_parts import roofline
from bench_gpu_parts.machine import AttentionCase, EngineName, KernelName, Sampling, ServedLoad, StepTime
from bench_gpu_parts.quantized import QuantizedName
from bench_gpu_parts.roofline import GpuCeilings
from bench_gpu_parts.sections import cost_of
from bench_gpu_parts.shapes import ShapeName
from bench_gpu_parts.workloads import Load

H200 = GpuCeilings(copy_bytes=4.3e12, matrix_flops=790e12)
"""Rates measured on an H200."""
SLOWNESS = {"octavo": 1.35, "octavo-fast": 1.25, "transformers": 6.0, "sdpa": 1.6, "flex": 1.8}
HOST_S = 0.0004
IDLE_SHARE = 0.03


class FakeGpu:
    """See `octavo`'s `Gpu`: every answer follows from the ceilings of an H200.

    Args:
        failing: names of engines and kernels that fail.
    """

    def __init__(self, failing: frozenset[str] = frozenset()) -> None:
        self._failing = failing

    def name(self) -> str:
        """Return a name that marks it as fake."""
        return "no GPU, figures invented"

    def total_bytes(self) -> int:
        """Return the memory of an H200."""
        return 141 * 10**9

    def ceilings(self, limit_s: float) -> GpuCeilings:
        """Return the ceilings of an H200."""
        return H200

    def attention(self, kernel: KernelName, case: AttentionCase, limit_s: float) -> float:
        """Return a multiple of the bound."""
        if case.num_tokens > 1:
            least_s = roofline.prefill_attention_seconds(H200, case.context, case.num_heads, case.head_dim)
        else:
            least_s = roofline.decode_attention_seconds(
                H200, case.batch, case.context, case.num_kv_heads, case.head_dim
            )
        return self._slowness(kernel) * least_s

    def quantized_layer(self, name: QuantizedName, num_rows: int, limit_s: float) -> float:
        """Return a multiple of the bound."""
        return self._slowness("octavo") * roofline.quantized_seconds(H200, name, num_rows)

    @contextmanager
    def steps(
        self, shape: ShapeName | None, *, max_tokens: int, max_batch: int, limit_s: float, cache_dtype: str = "auto"
    ) -> Iterator["FakeSteps"]:
        """Load nothing."""
        yield FakeSteps(cost_of(shape) if shape else None, self._slowness("octavo"))

    def serve(self, shape: ShapeName, load: Load, limit_s: float) -> ServedLoad:
        """Return the arrival rate of the requests as throughput, and gaps that are a multiple of the bound."""
        step_s = self._slowness("octavo") * roofline.decode_seconds(cost_of(shape), H200, 64, load.input_len)
        return ServedLoad(load.rate * load.output_len, 20 * step_s, step_s, 3 * step_s, IDLE_SHARE)

    @contextmanager
    def engine(
        self, name: EngineName, shape: ShapeName, *, temperature: float, max_model_len: int, limit_s: float
    ) -> Iterator["FakeEngine"]:
        """Start nothing."""
        yield FakeEngine(cost_of(shape), self._slowness(name))

    def _slowness(self, name: str) -> float:
        if name in self._failing:
            raise EngineFailure(f"{name} was told to fail")
        return SLOWNESS[name]


class FakeSteps:
    """Steps of a model that was not loaded."""

    def __init__(self, cost: ModelCost | None, slowness: float) -> None:
        self._cost = cost
        self._slowness = slowness

    def step(
        self, batch: int, context: int, num_tokens: int, *, asks_busy: bool = False, sampling: Sampling | None = None
    ) -> StepTime:
        """Return a multiple of the bound."""
        if self._cost is None:
            return StepTime(HOST_S)
        if num_tokens > 1:
            return StepTime(self._slowness * roofline.prefill_seconds(self._cost, H200, num_tokens))
        step_s = self._slowness * roofline.decode_seconds(self._cost, H200, batch, context)
        return StepTime(step_s, (1 - IDLE_SHARE) * step_s if asks_busy else None)

    def mixed_step(self, batch: int, context: int, chunk: int) -> StepTime:
        """Return a multiple of the bound."""
        assert self._cost is not None
        step_s = self._slowness * roofline.mixed_seconds(self._cost, H200, batch, context, chunk)
        return StepTime(step_s, (1 - IDLE_SHARE) * step_s)


class FakeEngine:
    """An engine that generates nothing."""

    def __init__(self, cost: ModelCost, slowness: float) -> None:
        self._cost = cost
        self._slowness = slowness

    def generate(self, workload: Workload, limit_s: float) -> float:
        """Return a multiple of the bound."""
        return self._slowness * roofline.workload_seconds(self._cost, H200, workload)
