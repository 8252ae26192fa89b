"""Transfer of the residual stream between stages: through shared memory on one machine, or by torch.distributed."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.stage_exchange import native as stage_exchange
from octavo.kernels.stage_exchange.link import SharedMemoryLink
from octavo.protocol.config import ModelFacts
from octavo.protocol.errors import ConfigError

_WIDTHS = ("hidden_size", "n_embd", "d_model")
"""Keys of `config.json` for the width of the residual stream."""


def residual_width(facts: ModelFacts) -> int:
    """Return the columns of the residual stream.

    Raises:
        ConfigError: config.json does not tell.
    """
    for key in _WIDTHS:
        if width := facts.hf_config.get(key):
            return int(width)
    raise ConfigError(f"config.json has none of {', '.join(_WIDTHS)}: the model cannot be divided into stages")


class SharedMemoryStages:
    """See `StageExchange`. For native programs, into which it is recorded.

    Args:
        previous: link from the previous stage; `None` if this is the first one.
        following: link to the next stage; `None` if this is the last one.
        width: columns of the residual stream.
        library: library of the programs.
    """

    def __init__(
        self,
        previous: SharedMemoryLink | None,
        following: SharedMemoryLink | None,
        width: int,
        library: NativeLibrary,
    ) -> None:
        self._previous = previous
        self._following = following
        self._width = width
        self._library = library

    def receive(self, positions_T: Tensor, num_parts: int) -> list[Tensor]:
        """See `StageExchange`."""
        assert self._previous is not None, "the first stage receives nothing"
        return stage_exchange.record_receive(positions_T, num_parts, self._width, self._previous)

    def send(self, parts: Sequence[Tensor]) -> None:
        """See `StageExchange`."""
        assert self._following is not None, "the last stage sends nothing"
        stage_exchange.record_send(parts, self._width, self._following)

    def all_succeeded(self, has_succeeded: bool) -> bool:
        """See `StageExchange`."""
        before_11 = torch.ones(1, 1)
        if self._previous is not None:
            stage_exchange.receive(before_11, self._previous, self._library)
        so_far_11 = before_11 * has_succeeded
        if self._following is not None:
            stage_exchange.send(so_far_11, self._following, self._library)
        return bool(so_far_11)


class DistributedStages:
    """See `StageExchange`. For stages that compute through torch.

    Args:
        rank: rank of this worker among all.
        distance: rank distance between a worker and the one with the same part of the next stage.
        width: columns of the residual stream.
        dtype: type of the model.
        device: device of this worker.
    """

    _MAX_UNSENT = 2

    def __init__(
        self, rank: int, distance: int, width: int, dtype: torch.dtype, device: torch.device = torch.device("cpu")
    ) -> None:
        self._rank, self._distance = rank, distance
        self._width, self._dtype, self._device = width, dtype, device
        self._unsent: deque[tuple[distributed.Work, Tensor]] = deque()
        """Transfers that the next stage has not received yet, oldest first."""

    def receive(self, positions_T: Tensor, num_parts: int) -> list[Tensor]:
        """See `StageExchange`."""
        return list(self.receive_rows(len(positions_T), num_parts))

    def receive_rows(self, num_rows: int, num_parts: int) -> Tensor:
        """Return matrices of the previous stage. On a GPU the stream waits for them, and the host does not."""
        parts_NTD = torch.empty(num_parts, num_rows, self._width, dtype=self._dtype, device=self._device)
        distributed.recv(parts_NTD, self._rank - self._distance)
        return parts_NTD

    def send(self, parts: Sequence[Tensor]) -> None:
        """See `StageExchange`."""
        parts_NTD = torch.stack(list(parts))
        work = distributed.isend(parts_NTD, self._rank + self._distance)
        assert work is not None, "all workers are in the group"
        self._unsent.append((work, parts_NTD))
        while len(self._unsent) > self._MAX_UNSENT:
            oldest, _ = self._unsent.popleft()
            oldest.wait()

    def all_succeeded(self, has_succeeded: bool) -> bool:
        """See `StageExchange`."""
        is_first = self._rank < self._distance
        is_last = self._rank + self._distance >= distributed.get_world_size()
        before_1D = torch.ones(1, self._width, dtype=self._dtype, device=self._device)
        if not is_first:
            (before_1D,) = self.receive_rows(1, 1)
        so_far_1D = before_1D * has_succeeded
        if not is_last:
            self.send([so_far_1D])
        return bool(so_far_1D.all())


class GraphStages:
    """See `StageExchange`. For stages whose steps are CUDA graphs, which read and write fixed memory.

    The exchange runs between two graphs, not within one: each stage's graph pads its step to a different size, but
    exactly the rows of the step are exchanged. Besides, graphs are captured, and padding steps computed, without the
    other stages. NCCL has a stream for each pair of stages, so transfers overlap with computation.

    Args:
        link: link to the previous and the next stage.
        max_rows: most rows of a step, padding included.
        width: columns of the residual stream.
        dtype: type of the model.
        device: device of this worker.
    """

    _MAX_PARTS = 2
    """Exchanged matrices: hidden states, and an update to add to them. Some models have no update."""

    def __init__(
        self,
        link: DistributedStages,
        max_rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._link = link
        self._received_NTD = torch.zeros(self._MAX_PARTS, max_rows, width, dtype=dtype, device=device)
        self._computed_NTD = torch.zeros_like(self._received_NTD)

    def receive(self, positions_T: Tensor, num_parts: int) -> list[Tensor]:
        """See `StageExchange`. Returns the rows that `fetch` received, and padding."""
        return list(self._received_NTD[:num_parts, : len(positions_T)])

    def send(self, parts: Sequence[Tensor]) -> None:
        """See `StageExchange`. Keeps the rows for `pass_on`."""
        for part_TD, computed_TD in zip(parts, self._computed_NTD, strict=False):
            computed_TD[: len(part_TD)].copy_(part_TD)

    def fetch(self, num_rows: int) -> None:
        """Receive the rows of the next step to compute."""
        parts_NTD = self._link.receive_rows(num_rows, self._MAX_PARTS)
        self._received_NTD[:, :num_rows].copy_(parts_NTD)

    def pass_on(self, num_rows: int) -> None:
        """Send the rows of the latest step. They are copied, so the next step may be computed."""
        self._link.send(list(self._computed_NTD[:, :num_rows]))

    def all_succeeded(self, has_succeeded: bool) -> bool:
        """See `StageExchange`."""
        return self._link.all_succeeded(has_succeeded)
