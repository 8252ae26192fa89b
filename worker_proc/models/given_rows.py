"""Memory for the rows that a step's requests give in place of token embeddings. Knows no request."""

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.given_rows import take_given_rows
from octavo.kernels.native.memory import allocate
from octavo.worker_proc.batch.inputs import GivenInputs
from octavo.worker_proc.device.stream import Stream


class GivenRows:
    """The rows of the step that is computed, at a fixed place: programs and graphs read them there.

    Args:
        max_rows: of a step.
        width: of a row.
        dtype: of the model.
        device: of the model.
    """

    def __init__(self, max_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        num_bytes = max_rows * width * dtype.itemsize
        on_host = device.type == "cpu"  # where only the rows that are ever used take memory
        memory_B = allocate(num_bytes) if on_host else torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.rows_XD = memory_B[:num_bytes].view(dtype).view(max_rows, width)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.rows_XD.nbytes

    def replace(self, x_TD: Tensor, token_ids_T: Tensor) -> Tensor:
        """Return the rows of `x`, or where the token id says so those that are given."""
        return take_given_rows(x_TD, token_ids_T, self.rows_XD)

    def put(self, given: GivenInputs) -> None:
        """Take the rows of the next step, on the host."""
        rows_NB = np.frombuffer(given.data, dtype=np.uint8).reshape(len(given.indices_N), -1)
        self.rows_XD.view(torch.uint8).numpy()[given.indices_N] = rows_NB

    def send(self, given: GivenInputs, stream: Stream) -> None:
        """Copy the rows of the next step to the device, after the work before."""
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
