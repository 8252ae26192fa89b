"""Keeps a model's packed weights on disk, so that a later start maps them instead of loading and packing again.

The files are in `<cache>/packed`. The name of each contains a digest of everything that its content depends on. Mapped
weights share the page cache with every other process that maps them. Knows neither checkpoints nor packing.
"""

import contextlib
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch

from octavo.kernels.linear import Packer
from octavo.kernels.linear.native import NativeLinear, NativeProduct
from octavo.kernels.native.library import NativeLibrary
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.weight_files import WeightFiles, weight_files
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.weights.packed_file import TEMPORARY_SUFFIX, DamagedFile, Fields, Item, read, write

logger = logging.getLogger(__name__)

FOLDER = "packed"
SUFFIX = ".weights"
MIN_KEPT_BYTES = 32 * 2**20
"""Smaller models are not kept: loading and packing one takes no longer than writing a file."""
ABANDONED_AFTER_S = 3600.0
"""Age at which an incomplete file is removed."""
UNUSED_AFTER_S = 30 * 86400.0
"""Time since the last use after which a file is removed: most belong to an older model, library or release."""

_PACKAGE = Path(__file__).resolve().parents[2]
_DECIDING_CODE = ("worker_proc/weights", "worker_proc/models", "worker_proc/parallel", "kernels/linear")
"""Folders of the code that packs checkpoints: part of the key. The C++ is covered by the library's name."""


class PackedCache:
    """The packed weights of one model on disk.

    Args:
        folder: folder of all models' files.
        key: everything that the content depends on.
        name: readable part of the file name.
        max_bytes: size limit of all files in the folder together.
    """

    def __init__(self, folder: Path, key: str, name: str, max_bytes: int) -> None:
        self._folder = folder
        self.key = key
        self._max_bytes = max_bytes
        self.path = folder / f"{name}-{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}{SUFFIX}"

    @classmethod
    def of(
        cls,
        config: ResolvedConfig,
        library: NativeLibrary | None,
        cache_dir: Path,
        rank: int = 0,
        layers: range | None = None,
    ) -> "PackedCache | None":
        """Return the cache; `None` if packed weights are not kept, as for dummy weights and torch's own packed form.

        Args:
            config: its model, dtype and quantization decide what the weights are.
            library: library that packs them.
            cache_dir: cache directory of octavo.
            rank: rank whose part of the weights it is, among the ranks that share every layer.
            layers: layers of the stage; `None` means all.
        """
        if library is None or config.model.load_format == "dummy" or not config.packed_weights_cache_bytes:
            return None
        facts, path = config.model, Path(config.model.model_path)
        identity = [
            library.path.name,
            _digest(code for folder in _DECIDING_CODE for code in sorted((_PACKAGE / folder).rglob("*.py"))),
            config.dtype,
            config.quantization,
            [
                facts.architecture,
                facts.model_impl,
                facts.hf_config,
                facts.vocab_size,
                facts.num_layers,
                facts.max_position_embeddings,
                facts.pooling,
            ],
            [facts.num_heads, facts.num_kv_heads, facts.head_dim],
            _files(weight_files(path, facts.load_format)),
            [rank, config.tensor_parallel_size, config.enable_expert_parallel, config.enable_tp_invariant_inference],
            [config.engine_index, config.data_parallel_size] if config.is_lock_step else [],
            [layers.start, layers.stop] if layers and config.pipeline_parallel_size > 1 else [],
        ]
        name = re.sub(r"[^\w.-]", "_", path.stem if path.is_file() else path.name)[:80]
        key = msgspec.json.encode(identity, order="deterministic").decode()
        return cls(cache_dir / FOLDER, key, name, config.packed_weights_cache_bytes)

    def restore(self, parameters: Parameters, packer: Packer) -> bool:
        """Fill a model from its file. Return False if there is no usable file."""
        try:
            items = read(self.path, self.key)
            _adopt(parameters, packer, items)
        except FileNotFoundError:
            return False
        except (DamagedFile, OSError, ValueError) as error:
            logger.warning("ignoring packed weights in %s, they will be rebuilt: %s", self.path, error)
            return False
        with contextlib.suppress(OSError):  # in a folder that others may only read
            os.utime(self.path)
        logger.info("mapped packed weights from %s", self.path)
        return True

    def keep(self, parameters: Parameters, packer: Packer) -> None:
        """Write a packed model's file, and let the model use the file's memory instead of its own.

        Does nothing for a small model. If the file cannot be written, logs a warning and leaves the model as it is.
        """
        items = _items(parameters)
        num_bytes = sum(buffer.nbytes for item in items.values() for buffer in item.buffers.values())
        if num_bytes < MIN_KEPT_BYTES:
            return
        if num_bytes > self._max_bytes:
            limit = f"--packed-weights-cache-bytes {self._max_bytes}"
            logger.warning("packed weights are not kept for the next start: %d bytes exceed %s", num_bytes, limit)
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._prune(self._max_bytes - num_bytes)
            if num_bytes > shutil.disk_usage(self._folder).free // 2:
                logger.warning(
                    "packed weights are not kept for the next start: %d bytes are over half of the free space of %s",
                    num_bytes,
                    self._folder,
                )
                return
            start_s = time.perf_counter()
            write(self.path, self.key, items)
        except OSError as error:
            logger.warning("packed weights cannot be kept for the next start: %s", error)
            return
        logger.info("kept packed weights in %s (%.1f s)", self.path, time.perf_counter() - start_s)
        self.restore(parameters, packer)

    def _prune(self, max_bytes: int) -> None:
        """Remove the least recently used files until the rest is at most `max_bytes` large.

        A process that has mapped a removed file keeps its mapping.
        """
        now_s = time.time()
        for path, stat in _stats(self._folder.glob(f"*{TEMPORARY_SUFFIX}")):
            if stat.st_mtime < now_s - ABANDONED_AFTER_S:
                path.unlink(missing_ok=True)
        files = sorted(_stats(self._folder.glob(f"*{SUFFIX}")), key=lambda file: file[1].st_mtime_ns, reverse=True)
        for path, stat in files:
            max_bytes -= stat.st_size
            if max_bytes < 0 or stat.st_mtime < now_s - UNUSED_AFTER_S:
                path.unlink(missing_ok=True)


def _items(parameters: Parameters) -> dict[str, Item]:
    items = {}
    for name, tensor in parameters.tensors.items():
        fields: Fields = {"type": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        items[name] = Item(fields, {"data": tensor.contiguous().view(-1).view(torch.uint8)})
    for name, packed in parameters.packed.items():
        assert isinstance(packed.product, NativeProduct), "packed by the native library"
        header, buffers = packed.product.packed.to_buffers()
        items[name] = Item(dict(header), buffers)
    return items


def _adopt(parameters: Parameters, packer: Packer, items: dict[str, Item]) -> None:
    tensors, packed = {}, {}
    for name, item in items.items():
        match item.fields:
            case {"type": str(type_name), "shape": list(shape)}:
                tensors[name] = item.buffers["data"].view(getattr(torch, type_name)).view(shape)
            case {**header}:
                numbers = {key: value for key, value in header.items() if not isinstance(value, list)}
                packed[name] = packer.adopt(NativeLinear.from_buffers(numbers, dict(item.buffers)))
    parameters.adopt(tensors, packed)


def _files(checkpoint: WeightFiles) -> list[list[str | int]]:
    """Return the identity of a checkpoint's files, from their paths, sizes and times. Reads none of them."""
    files = [*checkpoint.files, *([checkpoint.index] if checkpoint.index else [])]
    # In the Hugging Face cache the real path of a file contains the digest of its content.
    return [[str(file.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino] for file, stat in _stats(files)]


def _stats(paths: Iterable[Path]) -> list[tuple[Path, os.stat_result]]:
    """Return the stat result of each file, without files that were removed meanwhile."""
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            found.append((path, path.stat()))
    return found


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()
