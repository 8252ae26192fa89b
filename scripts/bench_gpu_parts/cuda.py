"""A real GPU. Everything that uses it runs in a separate process that is killed at its time limit.

This process does not use CUDA. Only one process at a time holds the GPU's memory.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_cpu_parts.engines import PARTS as CPU_PARTS
from bench_cpu_parts.engines import Command
from bench_cpu_parts.session import Conversation, EngineFailure, Session
from bench_cpu_parts.workloads import Workload

from bench_gpu_parts.calls import Calls
from bench_gpu_parts.machine import AttentionCase, EngineName, KernelName, Sampling, ServedLoad, StepTime
from bench_gpu_parts.quantized import QuantizedName
from bench_gpu_parts.roofline import GpuCeilings
from bench_gpu_parts.shapes import SHAPES, TINY, ShapeName, write_model
from bench_gpu_parts.workloads import Load

PARTS = Path(__file__).parent
MAX_NUM_SEQS = 256
START_LIMIT_S = 60.0
STEP_LIMIT_S = 60.0
WRITE_LIMIT_S = 60.0
SHARED_WEIGHTS: ShapeName = "Qwen3-0.6B"
"""Shape that several engines are measured with: its weights are written to a file."""


class CudaGpu:
    """See `Gpu`.

    Args:
        logs: directory for the logs of the processes and for the models.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._calls: Calls | None = None
        self._facts: dict[str, Any] = {}

    def name(self) -> str:
        """See `Gpu`."""
        return str(self._known("name"))

    def total_bytes(self) -> int:
        """See `Gpu`."""
        return int(self._known("total_bytes"))

    def ceilings(self, limit_s: float) -> GpuCeilings:
        """See `Gpu`."""
        return GpuCeilings(**self._kernels().call("ceilings", limit_s))

    def attention(self, kernel: KernelName, case: AttentionCase, limit_s: float) -> float:
        """See `Gpu`; a process in which a kernel failed is not used again."""
        try:
            return float(self._kernels().call("attention", limit_s, kernel=kernel, **asdict(case)))
        except EngineFailure:
            self.close()
            raise

    def quantized_layer(self, name: QuantizedName, num_rows: int, limit_s: float) -> float:
        """See `Gpu`; a process in which a kernel failed is not used again."""
        try:
            return float(self._kernels().call("quantized_layer", limit_s, name=name, num_rows=num_rows))
        except EngineFailure:
            self.close()
            raise

    @contextmanager
    def steps(
        self, shape: ShapeName | None, *, max_tokens: int, max_batch: int, limit_s: float, cache_dtype: str = "auto"
    ) -> Iterator["CudaSteps"]:
        """See `Gpu`."""
        settings = {"kv_cache_dtype": cache_dtype}
        self.close()
        model = write_model(SHAPES[shape] if shape else TINY, self._logs / (shape or "tiny"))
        with Calls(_driver("gpu"), self._logs / "steps.log", START_LIMIT_S) as calls:
            sizes = {"max_tokens": max_tokens, "max_batch": max_batch}
            calls.call("open_steps", limit_s, model=str(model), settings=settings, **sizes)
            yield CudaSteps(calls)

    def serve(self, shape: ShapeName, load: Load, limit_s: float) -> ServedLoad:
        """See `Gpu`; the engine's processes end together with the process that calls it."""
        self.close()
        model = write_model(SHAPES[shape], self._logs / f"{shape}-served")
        traces = self._logs / f"traces-{shape}"
        settings = {
            "device": "cuda",
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_model_len": load.input_len + load.output_len + 8,
        }
        with Calls(_driver("gpu"), self._logs / f"serve-{shape}.log", START_LIMIT_S) as calls:
            arguments = {"model": str(model), "settings": settings, "load": asdict(load), "traces": str(traces)}
            return ServedLoad(**calls.call("serve_load", limit_s, **arguments))

    @contextmanager
    def engine(
        self, name: EngineName, shape: ShapeName, *, temperature: float, max_model_len: int, limit_s: float
    ) -> Iterator["CudaEngine"]:
        """See `Gpu`."""
        self.close()
        model = self._model(shape)
        options: dict[str, Any] = {"model": str(model), "temperature": temperature}
        if name == "transformers":
            command = _driver("transformers", json.dumps(options))
        else:
            options["settings"] = {
                "device": "cuda",
                "load_format": "auto" if list(model.glob("*.safetensors")) else "dummy",
                "skip_tokenizer_init": True,
                "max_num_seqs": MAX_NUM_SEQS,
                "max_model_len": max_model_len,
                "enable_deterministic_inference": name == "octavo",
            }
            command = Command((sys.executable, str(CPU_PARTS / "drive_octavo.py"), json.dumps(options)), _environment())
        with Session(command, self._logs / f"{name}-{shape}.log", min(limit_s, 2 * START_LIMIT_S)) as session:
            yield CudaEngine(session)

    def close(self) -> None:
        """End the process that runs kernels, to free its memory; it is started again when needed."""
        if self._calls is not None:
            self._calls.close()
            self._calls = None

    def _kernels(self) -> Calls:
        if self._calls is None:
            self._calls = Calls(_driver("gpu"), self._logs / "kernels.log", START_LIMIT_S)
        return self._calls

    def _known(self, fact: str) -> Any:
        if not self._facts:
            self._facts = self._kernels().call("facts", START_LIMIT_S)
        return self._facts[fact]

    def _model(self, shape: ShapeName) -> Path:
        """Return the model's directory, with weights if engines are compared with it and weights can be written."""
        model = self._logs / shape
        if shape != SHARED_WEIGHTS:
            return write_model(SHAPES[shape], model)
        if not model.exists():
            write_model(SHAPES[shape], model)
            options = json.dumps({"model": str(model), "writes": True})
            try:
                with Conversation(_driver("transformers", options), self._logs / "weights.log", WRITE_LIMIT_S):
                    pass
            except EngineFailure as error:
                print(f"  weights of each engine's own, because none can be written: {error}", flush=True)
        return model


class CudaSteps:
    """See `Steps`."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def step(
        self, batch: int, context: int, num_tokens: int, *, asks_busy: bool = False, sampling: Sampling | None = None
    ) -> StepTime:
        """See `Steps`."""
        sizes = {"batch": batch, "context": context, "num_tokens": num_tokens}
        return StepTime(*self._calls.call("step", STEP_LIMIT_S, **sizes, asks_busy=asks_busy, sampling=sampling))

    def mixed_step(self, batch: int, context: int, chunk: int) -> StepTime:
        """See `Steps`."""
        return StepTime(*self._calls.call("mixed_step", STEP_LIMIT_S, batch=batch, context=context, chunk=chunk))


class CudaEngine:
    """See `Engine`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def generate(self, workload: Workload, limit_s: float) -> float:
        """See `Engine`."""
        return self._session.generate(workload, limit_s)


def _driver(name: str, *arguments: str) -> Command:
    # The package's folder must not be first on the path: NVIDIA has a package named `cuda`.
    return Command((sys.executable, "-P", str(PARTS / f"drive_{name}.py"), *arguments), _environment())


def _environment() -> tuple[tuple[str, str], ...]:
    """Return the environment in which a process finds the same packages, including bundled wheels."""
    return (("PYTHONPATH", ":".join(path for path in sys.path if path)), ("HF_HUB_OFFLINE", "1"))
