"""The identity of an engine: engines of one identity give every request the same bits, so a request may move.

It is a digest of the weights and of every setting that tokens or logprobs depend on, made by the core when it starts.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from octavo.protocol.config import DeviceFacts, ModelFacts, ResolvedConfig
from octavo.protocol.version import __version__
from octavo.protocol.weight_files import weight_files

DIGEST_BYTES = 16

PAGE_BYTES = 4096
MAX_PAGES = 4096
"""Pages that are read of a checkpoint; all of them up to 16 MiB, of a larger one this many at equal distances."""

_DECISIVE = (
    *("dtype", "quantization", "kv_cache_dtype", "device", "cpu_kernels", "is_batch_invariant", "logprobs_mode"),
    "calculate_kv_scales",
    *("logits_processors", "tensor_parallel_size", "enable_expert_parallel", "enable_tp_invariant_inference"),
)
"""Settings of an engine that the tokens or logprobs of a `Submit` may depend on."""

_VECTOR_FLAGS = ("avx", "amx", "fma", "f16c", "asimd", "sve", "bf16", "i8mm")
"""Beginnings of the names that Linux gives to instruction sets with which a product may have other bits."""


def weights_digest(model: ModelFacts) -> str:
    """Return a digest of a model's weights, as hexadecimal digits; "" for random weights.

    It covers the names and sizes of the files and `MAX_PAGES` pages of their contents, the first and the last among
    them: so it costs the same for every size, and does not depend on where the files are or when they were written. A
    change of at least 1/`MAX_PAGES` of the checkpoint in one piece is always found; a smaller one may not be.

    Raises:
        OSError: a file cannot be read.
        ConfigError: files are missing.
    """
    if model.load_format == "dummy":
        return ""
    path = Path(model.model_path)
    files = weight_files(path, model.load_format).files
    sizes = [file.stat().st_size for file in files]
    num_pages = sum(-(-size // PAGE_BYTES) for size in sizes)
    stride = -(-num_pages // MAX_PAGES)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for file, size in zip(files, sizes, strict=True):
        # The name of a single file says nothing about its contents.
        digest.update(msgspec.json.encode([file.name if path.is_dir() else "", size]))
        _add_pages(digest, file, -(-size // PAGE_BYTES), max(1, stride))
    return digest.hexdigest()


def identity_of(config: ResolvedConfig, weights: str, workers: Sequence[DeviceFacts], weight_version: int = 0) -> str:
    """Return the identity of an engine.

    Args:
        config: of the engine.
        weights: their digest.
        workers: what they compute with; another kind of GPU may compute other bits.
        weight_version: of the weights, if they were updated since the start of the engine.
    """
    parts = [weights, weight_version, identity_parts(config, workers)]
    return hashlib.blake2b(msgspec.json.encode(parts, order="sorted"), digest_size=DIGEST_BYTES).hexdigest()


def identity_parts(config: ResolvedConfig, workers: Sequence[DeviceFacts]) -> dict[str, str]:
    """Return all that the identity covers besides the weights, by name, as text.

    Settings have their own names, so that two engines can say in which one they differ.
    """
    if config.device == "cpu":
        # The bits depend neither on the number of threads, which is part of the device's name, nor on its model. They
        # depend on the kernels that a worker has found, which may be others than `cpu_kernels` prefers.
        kernels = sorted({worker.cpu_kernels for worker in workers})
        processors = {"processor": " ".join(instruction_sets()), "kernel_level": ", ".join(kernels)}
    else:
        processors = {"processor": ", ".join([worker.device_name for worker in workers])}
    decisive = {name: value if isinstance(value, str) else _encoded(value) for name, value in _decisive(config).items()}
    return {"version": __version__, **processors, **decisive}


def has_same_bits(config: ResolvedConfig, other: ResolvedConfig) -> bool:
    """Return whether engines of two configurations compute the same bits on one machine with the same weights."""
    return _encoded(_decisive(config)) == _encoded(_decisive(other))


def _decisive(config: ResolvedConfig) -> dict[str, object]:
    model = config.model
    parts = {
        "architecture": model.architecture,
        "hf_config": hashlib.blake2b(_encoded(model.hf_config).encode(), digest_size=DIGEST_BYTES).hexdigest(),
        "vocab_size": model.vocab_size,
        "is_transformers": model.model_impl == "transformers",
        **{name: getattr(config, name) for name in _DECISIVE},
    }
    if model.load_format == "dummy":
        parts["seed"] = config.seed
    if config.lora is not None:
        parts["lora"] = [config.lora.dtype, config.lora.max_rank, config.lora.is_fully_sharded]
    return parts


def _encoded(value: object) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


def instruction_sets() -> list[str]:
    """Return the instruction sets of this machine's processor that kernels are compiled for."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return sorted(flag for flag in value.split() if flag.startswith(_VECTOR_FLAGS))
    return []


def _add_pages(digest: "hashlib.blake2b", path: Path, num_pages: int, stride: int) -> None:
    """Add every page whose number is a multiple of `stride`, and the last one."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for page in [*range(0, num_pages, stride), max(0, num_pages - 1)]:
            digest.update(os.pread(fd, PAGE_BYTES, page * PAGE_BYTES))
    finally:
        os.close(fd)
