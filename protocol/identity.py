"""The identity of an engine: engines with the same identity compute identical bits, so a request may move between them.

It is a digest of the weights and of every setting on which tokens or logprobs depend. The core computes it at start-up.
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
"""Number of pages that are read of a checkpoint: all pages up to 16 MiB, or this many at equal distances."""

_DECISIVE = (
    *("dtype", "quantization", "kv_cache_dtype", "device", "cpu_kernels", "is_batch_invariant", "logprobs_mode"),
    "calculate_kv_scales",
    *("logits_processors", "tensor_parallel_size", "enable_expert_parallel", "enable_tp_invariant_inference"),
)
"""Settings of an engine on which the tokens or logprobs of a `Submit` may depend."""

_VECTOR_FLAGS = ("avx", "amx", "fma", "f16c", "asimd", "sve", "bf16", "i8mm")
"""Prefixes of Linux's names of instruction sets with which a product may have different bits."""


def weights_digest(model: ModelFacts) -> str:
    """Return a digest of a model's weights in hexadecimal digits. Return "" for random weights.

    It covers the names and sizes of the files and `MAX_PAGES` pages of their contents, including the first and the last
    one. So it costs the same for every size, and does not depend on the location or time of the files. A contiguous
    change of at least 1/`MAX_PAGES` of the checkpoint is always detected; a smaller one may not be.

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
        config: the engine's configuration.
        weights: digest of the weights.
        workers: the workers' devices; another kind of GPU may compute different bits.
        weight_version: version of the weights, if they were updated since the engine's start.
    """
    parts = [weights, weight_version, identity_parts(config, workers)]
    return hashlib.blake2b(msgspec.json.encode(parts, order="sorted"), digest_size=DIGEST_BYTES).hexdigest()


def identity_parts(config: ResolvedConfig, workers: Sequence[DeviceFacts]) -> dict[str, str]:
    """Return everything that the identity covers besides the weights, as text by name.

    Settings are listed by name, so that two engines can report in which one they differ.
    """
    if config.device == "cpu":
        # The bits depend neither on the number of threads, which is part of the device's name, nor on its model. They
        # depend on the kernels that a worker has found, which may differ from those that `cpu_kernels` prefers.
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
    """Return the instruction sets of this machine's CPU for which kernels are compiled."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return sorted(flag for flag in value.split() if flag.startswith(_VECTOR_FLAGS))
    return []


def _add_pages(digest: "hashlib.blake2b", path: Path, num_pages: int, stride: int) -> None:
    """Add every page whose number is a multiple of `stride`, and the last page."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for page in [*range(0, num_pages, stride), max(0, num_pages - 1)]:
            digest.update(os.pread(fd, PAGE_BYTES, page * PAGE_BYTES))
    finally:
        os.close(fd)
