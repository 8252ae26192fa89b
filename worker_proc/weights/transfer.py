"""Weights that a trainer broadcasts: the trainer is rank 0 of a torch.distributed group, the workers are the others.

Every worker gets every tensor, in the order of the trainer, and takes its part, as from a checkpoint. The group is not
one of torch's named process groups, so a worker can have it in addition to the group in which it computes.
"""

import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    BroadcastOptions,
    ProcessGroupGloo,
    TCPStore,
)

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import ConfigError
from octavo.protocol.weights import TensorShape, Transfer, TransferBackend, TransferGroup

logger = logging.getLogger(__name__)

JOINED = "joined"
"""A worker sets the key "joined/RANK" in the store before it connects to the other ranks."""


class TransferRank:
    """A rank of a group. Blocks until all ranks have joined.

    Args:
        group: the group to join.
        rank: rank of this process; 0 is the trainer.
        store: store of the process group.
        device: device of this process; "gloo" moves tensors through host memory anyway.

    Raises:
        RuntimeError: the others have not joined in time, or the backend does not support the device.
    """

    def __init__(self, group: TransferGroup, rank: int, store: TCPStore, device: torch.device) -> None:
        require_backend(group.backend, device)
        self.rank = rank
        self.store = store
        self._timeout = timedelta(seconds=group.timeout_s)
        self.device = device if group.backend == "nccl" else torch.device("cpu")
        """Device of the tensors."""
        self._ranks: Any = None
        """A ProcessGroupGloo or ProcessGroupNCCL, whose methods torch does not declare; `None` after `close`."""
        if group.backend == "nccl":
            from torch.distributed import ProcessGroupNCCL  # only in builds with CUDA

            options = ProcessGroupNCCL.Options()
            options._timeout = 2 * self._timeout  # this timeout ends the process; `wait` raises earlier
            self._ranks = ProcessGroupNCCL(store, rank, group.world_size, options)
        else:
            self._ranks = ProcessGroupGloo(store, rank, group.world_size, self._timeout)

    def broadcast(self, tensor: Tensor) -> None:
        """Fill a contiguous tensor on `device` with that of rank 0. Blocks until it has arrived.

        Raises:
            RuntimeError: a rank is gone or silent; the group can no longer be used.
        """
        if self._ranks is None:
            raise RuntimeError("a transfer of weights has failed before: join the trainer again")
        options = BroadcastOptions()
        options.rootRank = 0
        self._ranks.broadcast([tensor], options).wait(self._timeout)

    def close(self) -> None:
        """Leave the group: the other ranks get an error instead of a timeout."""
        if self._ranks is not None:
            self._ranks.abort()
            self._ranks = None


class WeightReceiver:
    """A worker's membership in the group of a trainer, if there is one.

    Args:
        rank: rank of the worker, from 0.
        device: device that it computes on.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._group: TransferRank | None = None

    def join(self, group: TransferGroup) -> str:
        """Join a group, after leaving the previous one. Blocks until all ranks have joined.

        Returns:
            The reason of a failure; "" if there was none.
        """
        self.leave()
        rank = group.rank_offset + self._rank
        try:
            require_backend(group.backend, self._device)
            timeout = timedelta(seconds=group.timeout_s)
            store = TCPStore(group.address, group.port, None, is_master=False, timeout=timeout)
            store.set(f"{JOINED}/{rank}", "")
            self._group = TransferRank(group, rank, store, self._device)
        except (RuntimeError, ImportError, ValueError) as error:
            return f"cannot join the trainer at {group.address}:{group.port} as rank {rank}: {error}"
        logger.info("rank %d of a trainer's group at %s:%d", rank, group.address, group.port)
        return ""

    def leave(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def check(self, config: ResolvedConfig, transfer: Transfer) -> None:
        """Raise ConfigError if a transfer cannot be received."""
        if self._group is None:
            raise ConfigError(
                "this worker is in no group of a trainer",
                hint="a worker that was replaced, or whose last transfer failed, must join again: "
                "init_weight_transfer_engine",
            )
        if config.model.load_format in ("gguf", "mistral") or "quantization_config" in config.model.hf_config:
            raise ConfigError(
                "the engine was started with weights in another form than a trainer's",
                hint="start it with unquantized weights of Hugging Face's names, or update it from a checkpoint",
            )
        names = [tensor.name for tensor in transfer.tensors]
        if len(set(names)) != len(names):
            raise ConfigError(f"the transfer has {max(names, key=names.count)!r} twice")
        for tensor in transfer.tensors:
            dtype_of(tensor)

    def receive(self, transfer: Transfer, wants: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
        """Yield the wanted tensors, in host memory. The others are received too, as every rank must.

        Raises:
            RuntimeError: the trainer is gone or silent.
        """
        assert self._group is not None, "checked before"
        self._group.store.set(f"{transfer.transfer_id}/{self._group.rank}", "")
        for given in transfer.tensors:
            tensor = torch.empty(given.shape, dtype=dtype_of(given), device=self._group.device)
            try:
                self._group.broadcast(tensor)
            except RuntimeError as error:
                raise RuntimeError(f"the trainer did not send {given.name!r}: {error}") from error
            if wants(given.name):
                yield given.name, tensor.cpu()


def shapes_of(transfer: Transfer, wants: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """Yield the wanted tensors of a transfer, without values."""
    for given in transfer.tensors:
        if wants(given.name):
            yield given.name, torch.empty(given.shape, dtype=dtype_of(given), device="meta")


def require_backend(backend: TransferBackend, device: torch.device) -> None:
    """Raise RuntimeError if a backend does not support the device of this process."""
    if backend == "nccl" and device.type != "cuda":
        raise RuntimeError("backend nccl moves tensors between GPUs, and this process computes on a CPU: use gloo")


def dtype_of(tensor: TensorShape) -> torch.dtype:
    """Return the data type of a tensor.

    Raises:
        ConfigError: the type is not a type of weights.
    """
    if tensor.dtype not in ("float32", "float16", "bfloat16"):
        raise ConfigError(
            f"{tensor.name!r} has data type {tensor.dtype}",
            hint="broadcast float32, float16 or bfloat16; the engine converts them to its own",
        )
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return dtype
