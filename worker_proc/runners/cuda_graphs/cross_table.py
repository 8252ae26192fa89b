"""`CrossTable`: where graphs find the items that the requests of a step attend to."""

from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.worker_proc.batch.inputs import GroupInputs
from octavo.worker_proc.cache.cross import CrossCache
from octavo.worker_proc.device.stream import Stream, upload_array


@dataclass(slots=True, eq=False)
class CrossTable:
    """The block table of cross-attention, at a fixed address. Requests in the place of padding attend to any item."""

    cache: CrossCache
    block_table_RP: Tensor
    """int32, a row for each request of the largest step."""
    _sent_RP: npt.NDArray[np.int32] | None = field(default=None, init=False)

    @classmethod
    def of(cls, cache: CrossCache, num_requests: int) -> Self:
        """Make the table of a cache."""
        device = cache.layers[0][0].device
        return cls(cache, torch.zeros(num_requests, cache.blocks_per_item, dtype=torch.int32, device=device))

    def put(self, cross: GroupInputs, stream: Stream) -> None:
        """Have the steps from now on read the items of these requests. Decodes of the same requests send nothing."""
        table_RP = cross.block_table_RP
        assert table_RP is not None, "of cross-attention"
        if self._sent_RP is None or not np.array_equal(table_RP, self._sent_RP):
            self.block_table_RP[: len(table_RP)].copy_(upload_array(stream, table_RP))
            self._sent_RP = table_RP
