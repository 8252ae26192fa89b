"""The interface of a GPU for the sections; `cuda` implements it for real ones, `fake` for tests."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from bench_cpu_parts.workloads import Workload

from bench_gpu_parts.quantized import QuantizedName
from bench_gpu_parts.roofline import GpuCeilings
from bench_gpu_parts.shapes import ShapeName
from bench_gpu_parts.workloads import Load

MIXED_CHUNKS = 17
"""Chunks of the prompt in a measurement of mixed steps; the cache needs room for all of them."""

Sampling = dict[str, Any]
"""Sampling parameters by name."""

EngineName = Literal["octavo", "octavo-fast", "transformers"]
KernelName = Literal["octavo", "sdpa", "flex"]

TITLES = {
    "octavo": "octavo",
    "octavo-fast": "octavo, not deterministic",
    "transformers": "transformers",
    "sdpa": "torch SDPA",
    "flex": "FlexAttention",
    "sglang-flashinfer": "SGLang, FlashInfer (published)",
    "sglang-triton": "SGLang, Triton (published)",
    "sglang-deterministic": "SGLang, deterministic (published)",
}
"""All columns of the table, in order."""


@dataclass(frozen=True)
class AttentionCase:
    """One layer's attention of a step, with the heads of Llama-3.1-8B."""

    batch: int
    context: int
    num_tokens: int
    """Number of tokens computed for each request: 1, or the whole context."""
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    num_shared: int = 0
    """Number of keys that all requests share, in complete blocks."""
    key_value_dim: int | None = None
    """Dimension of values in latent attention, where they are prefixes of the keys; `None` for other attention."""


@dataclass(frozen=True)
class StepTime:
    """Times of a step in seconds, in a sequence of steps of its kind."""

    step_s: float
    busy_s: float | None = None
    """Time in which the GPU computed; `None` if it was not measured."""


@dataclass(frozen=True)
class ServedLoad:
    """Figures of requests that arrive at random."""

    output_tokens_per_s: float
    ttft_p99_s: float
    itl_median_s: float
    itl_p99_s: float
    idle_share: float
    """Fraction of the time with a busy engine in which the GPU computed nothing."""


class Steps(Protocol):
    """A model that runs steps without a core and a frontend."""

    def step(
        self, batch: int, context: int, num_tokens: int, *, asks_busy: bool = False, sampling: Sampling | None = None
    ) -> StepTime:
        """Run steps in which `batch` requests compute `num_tokens` each, the last of them at `context`.

        `sampling` has parameters that differ from a temperature of 0.6.
        """

    def mixed_step(self, batch: int, context: int, chunk: int) -> StepTime:
        """Run steps in which `batch` requests decode, and one more computes a chunk of its prompt."""


class Engine(Protocol):
    """An engine that generates."""

    def generate(self, workload: Workload, limit_s: float) -> float:
        """Generate all of a workload; return the seconds that it took."""


class Gpu(Protocol):
    """The GPU and its programs; every call raises `EngineFailure` if it fails or takes too long."""

    def name(self) -> str:
        """Return the name of the GPU, and the relevant versions."""

    def total_bytes(self) -> int:
        """Return the size of the GPU's memory in bytes."""

    def ceilings(self, limit_s: float) -> GpuCeilings:
        """Measure the GPU's ceilings."""

    def attention(self, kernel: KernelName, case: AttentionCase, limit_s: float) -> float:
        """Return the seconds of one layer's attention."""

    def quantized_layer(self, name: QuantizedName, num_rows: int, limit_s: float) -> float:
        """Return the seconds of the products of a layer of Llama-3.1-8B with quantized weights."""

    def steps(
        self, shape: ShapeName | None, *, max_tokens: int, max_batch: int, limit_s: float, cache_dtype: str = "auto"
    ) -> AbstractContextManager[Steps]:
        """Load a model with random weights; `None` for one that computes next to nothing.

        `max_tokens` is the cache capacity for all `max_batch` requests together; `cache_dtype` is `--kv-cache-dtype`.
        """

    def serve(self, shape: ShapeName, load: Load, limit_s: float) -> ServedLoad:
        """Serve requests that arrive at random, through all three processes."""

    def engine(
        self, name: EngineName, shape: ShapeName, *, temperature: float, max_model_len: int, limit_s: float
    ) -> AbstractContextManager[Engine]:
        """Start an engine with a model of this shape."""
