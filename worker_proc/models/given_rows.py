"""Memory for rows that a step's requests provide instead of token embeddings. Knows no requests."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.given_rows import take_given_rows
from octavo.kernels.native.memory import allocate
from octavo.worker_proc.batch.inputs import GivenInputs
from octavo.worker_proc.device.stream import Stream


class GivenRows:
    """The given rows of the current step, at a fixed address, where programs and graphs read them.

    Args:
        max_rows: most rows of a step.
        width: width of a row.
        dtype: type of the model.
        device: device of the model.
        num_deeper: number of additional rows for each row; they are added after the first layers, one per layer
            (DeepStack).
    """

    def __init__(
        self, max_rows: int, width: int, dtype: torch.dtype, device: torch.device, num_deeper: int = 0
    ) -> None:
        num_bytes = max_rows * width * dtype.itemsize
        on_host = device.type == "cpu"  # where rows take memory only once they are used
        memory_B = allocate(num_bytes) if on_host else torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.rows_XD = memory_B[:num_bytes].view(dtype).view(max_rows, width)
        # Native programs pass rows on in float32.
        self.deeper_LXD = torch.zeros(
            num_deeper, max_rows, width, dtype=torch.float32 if on_host else dtype, device=device
        )
        """Further rows of each layer; zeros where no row is given."""
        self._deeper: list[slice] = []
        """Rows of `deeper_LXD` that are not zero."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.rows_XD.nbytes + self.deeper_LXD.nbytes

    def replace(self, x_TD: Tensor, token_ids_T: Tensor) -> Tensor:
        """Return the rows of `x_TD`, replaced by given rows where the token id is `GIVEN`."""
        return take_given_rows(x_TD, token_ids_T, self.rows_XD)

    def put(self, given: GivenInputs | None) -> None:
        """Set the given rows of the next step, on the host; `None` if it has none."""
        self._clear_deeper()
        if given is None:
            return
        if len(given.indices_N):
            rows_NB = np.frombuffer(given.data, dtype=np.uint8).reshape(len(given.indices_N), -1)
            self.rows_XD.view(torch.uint8).numpy()[given.indices_N] = rows_NB
        self._take_media(given.media)

    def send(self, given: GivenInputs | None, stream: Stream) -> None:
        """Copy the given rows of the next step to the device, after earlier work; `None` if it has none."""
        self._clear_deeper()
        if given is None:
            return
        if len(given.indices_N):
            self._upload(given, stream)
        self._take_media(given.media)

    def _clear_deeper(self) -> None:
        for rows in self._deeper:
            self.deeper_LXD[:, rows] = 0.0
        self._deeper.clear()

    def _take_media(self, media: Sequence[tuple[int, Tensor]]) -> None:
        num_deeper, _, width = self.deeper_LXD.shape
        for first, rows_ND in media:
            rows = slice(first, first + len(rows_ND))
            self.rows_XD[rows] = rows_ND[:, :width]
            if num_deeper:
                self.deeper_LXD[:, rows] = rows_ND[:, width:].unflatten(1, (num_deeper, width)).transpose(0, 1)
                self._deeper.append(rows)

    def _upload(self, given: GivenInputs, stream: Stream) -> None:
        num_rows, num_bytes = len(given.indices_N), len(memoryview(given.data))
        start = given.indices_N.nbytes
        host_B = stream.host_buffer(start + num_bytes)
        array_B = host_B.numpy()
        array_B[:start] = given.indices_N.view(np.uint8)
        array_B[start:] = np.frombuffer(given.data, dtype=np.uint8)
        device_B = torch.empty(start + num_bytes, dtype=torch.uint8, device=stream.torch_device)
        stream.upload(device_B, host_B)
        rows_ND = device_B[start:].view(self.rows_XD.dtype).view(num_rows, -1)
        self.rows_XD.index_copy_(0, device_B[:start].view(torch.int64), rows_ND)
