"""`WeightSender`: a trainer that broadcasts its weights to the workers of a running engine."""

import asyncio
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from octavo.protocol.weights import InFlightMode, TensorShape, Transfer, TransferBackend, TransferGroup
from octavo.worker_proc.weights.transfer import JOINED, TransferRank, require_backend

_POLL_S = 0.005


class Engines(Protocol):
    """The methods of `AsyncClient` that a sender needs."""

    def get_world_size(self) -> int:
        """Return the number of workers."""

    async def init_weight_transfer_engine(self, group: TransferGroup) -> None:
        """Make all workers join the group."""

    async def update_weights(self, weights: Transfer, *, label: str, is_partial: bool, in_flight: InFlightMode) -> int:
        """Make all workers receive the weights."""


class WeightSender:
    """Rank 0 of the group. Create it with `open`."""

    def __init__(self, client: Engines, rank: TransferRank, world_size: int) -> None:
        self._client = client
        self._rank = rank
        self._world_size = world_size

    @classmethod
    async def open(
        cls,
        client: Engines,
        master_address: str = "127.0.0.1",
        master_port: int = 0,
        *,
        backend: TransferBackend = "gloo",
        timeout_s: float = 300.0,
    ) -> "WeightSender":
        """Make a group with all workers of a client's engines. Blocks until they have joined.

        Args:
            client: an `AsyncClient`.
            master_address: address of this machine, where the engines reach it.
            master_port: port of the group's store; 0: a free one.
            backend: "gloo", through host memory; "nccl", between GPUs: the current one is used.
            timeout_s: seconds that ranks wait for each other, at the start and for each tensor.

        Raises:
            RequestFailedError: an engine could not join; the message says why.
            RuntimeError: the port is taken, a worker is gone, or this process has no GPU for nccl.
        """
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        require_backend(backend, device)
        world_size = 1 + client.get_world_size()
        timeout = timedelta(seconds=timeout_s)
        store = TCPStore(master_address, master_port, None, True, timeout, wait_for_workers=False)
        group = TransferGroup(master_address, store.port, 1, world_size, backend, timeout_s)
        joining = asyncio.ensure_future(client.init_weight_transfer_engine(group))
        await _until_set(store, [f"{JOINED}/{rank}" for rank in range(1, world_size)], joining)
        rank = await asyncio.to_thread(TransferRank, group, 0, store, device)
        await joining
        return cls(client, rank, world_size)

    async def update(
        self,
        weights: Mapping[str, Tensor],
        *,
        label: str = "",
        is_partial: bool = False,
        in_flight: InFlightMode = "recompute",
    ) -> int:
        """Replace the weights of all engines; see `AsyncClient.update_weights`.

        Returns:
            The version of the new weights.

        Raises:
            InvalidRequestError, ConflictError: the engines have refused them before anything was sent, and go on.
            RequestFailedError: the transfer has failed. The engines reject requests until all weights are updated, and
                the next update needs a new sender.
            RuntimeError: a worker is gone.
        """
        shapes = [
            TensorShape(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            for name, tensor in weights.items()
        ]
        transfer = Transfer(uuid.uuid4().hex, shapes)
        updating = asyncio.ensure_future(
            self._client.update_weights(transfer, label=label, is_partial=is_partial, in_flight=in_flight)
        )
        keys = [f"{transfer.transfer_id}/{rank}" for rank in range(1, self._world_size)]
        await _until_set(self._rank.store, keys, updating)
        try:
            await asyncio.to_thread(self._send, weights)
        except RuntimeError:
            self.close()
            await updating  # its error says what happened to the engines
            raise
        return await updating

    def close(self) -> None:
        """End the group."""
        self._rank.close()

    def _send(self, weights: Mapping[str, Tensor]) -> None:
        for tensor in weights.values():
            self._rank.broadcast(tensor.detach().to(self._rank.device).contiguous())


async def _until_set(store: TCPStore, keys: list[str], call: "asyncio.Future[Any]") -> None:
    """Wait until workers have set keys. Raises the error of their call if it fails first."""
    while not store.check(keys):
        if call.done():
            call.result()
            raise RuntimeError("the call has ended, and not all workers took part in it: the group has too many ranks")
        await asyncio.sleep(_POLL_S)
