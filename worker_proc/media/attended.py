"""`AttendedItems`: keys and values of items for cross-attention, computed once per item."""

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.given_rows import all_given_rows
from octavo.kernels.native.arguments import GroupArguments, StepArguments
from octavo.kernels.native.memory import allocate
from octavo.kernels.native.passes import fuse
from octavo.kernels.native.program import Program
from octavo.kernels.native.recorder import ProgramRecorder
from octavo.kernels.native.threads import ThreadPolicy
from octavo.kernels.native.value import as_tensor
from octavo.kernels.store_kv import record, store_kv
from octavo.protocol.errors import ProtocolError
from octavo.worker_proc.batch.inputs import Ints
from octavo.worker_proc.batch.step_arguments import address
from octavo.worker_proc.cache.cross import CrossCache
from octavo.worker_proc.device.stream import Stream, upload_array
from octavo.worker_proc.models.base import Model


class AttendedItems:
    """The items in the `CrossCache` of a model, and the program that writes them.

    Args:
        model: model with cross-attention and its cache.
        cache: cache of the model.
        width: width of the encoder's rows.
        num_threads: most threads of a run.
        stream: stream of the device; `None` if the host computes.
    """

    def __init__(
        self, model: Model, cache: CrossCache, width: int, num_threads: int, stream: Stream | None = None
    ) -> None:
        self._model, self._cache, self._stream = model, cache, stream
        self._places: dict[bytes, int] = {}
        self._free = list(range(cache.num_items))
        self._program: Program | None = None
        if model.library is None:
            return
        num_bytes = cache.num_keys * width * torch.float32.itemsize
        self._inputs_XD = allocate(num_bytes)[:num_bytes].view(torch.float32).view(cache.num_keys, width)
        recorder = ProgramRecorder(model.dtype)
        rows = all_given_rows(as_tensor(recorder.token_ids), self._inputs_XD)
        for layer, buffers in zip(model.cross_layers, cache.layers, strict=True):
            record.record(*layer.keys_and_values(rows), *buffers, cache.layout)
        self._program = Program(model.library, fuse(recorder.nodes, []), [], cache.num_keys)
        self._threads = ThreadPolicy(model.library, num_threads)

    def place_of(self, digest: bytes) -> int:
        """Return the index of an item in the cross-attention cache.

        Raises:
            ProtocolError: the item is not in the cache.
        """
        if (place := self._places.get(digest)) is None:
            raise ProtocolError(f"media {digest.hex()[:16]} is attended to but not kept")
        return place

    def evict(self, digest: bytes) -> bool:
        """Drop an item. Return whether it was cached."""
        if (place := self._places.pop(digest, None)) is None:
            return False
        self._free.append(place)
        return True

    def put(self, digest: bytes, rows_TD: Tensor) -> None:
        """Compute and keep the keys and values of an item.

        Args:
            digest: digest of the item.
            rows_TD: rows that the encoder made of the item.

        Raises:
            ProtocolError: there is no place, or the item has another number of rows.
        """
        if len(rows_TD) != self._cache.num_keys or not self._free:
            raise ProtocolError(
                f"media {digest.hex()[:16]} has {len(rows_TD)} rows for {len(self._free)} places of "
                f"{self._cache.num_keys} rows"
            )
        place = self._places[digest] = self._free.pop()
        slots_T = self._cache.slots_of(place)
        if self._program is not None:
            self._inputs_XD[:] = rows_TD
            self._run(self._program, slots_T)
            return
        rows = rows_TD.to(self._model.dtype)
        places_T = torch.from_numpy(slots_T) if self._stream is None else upload_array(self._stream, slots_T)
        for layer, buffers in zip(self._model.cross_layers, self._cache.layers, strict=True):
            store_kv(*layer.keys_and_values(rows), *buffers, places_T)

    def _run(self, program: Program, slots_T: Ints) -> None:
        groups = (GroupArguments * (self._cache.group + 1))()
        groups[self._cache.group] = GroupArguments(slots=address(slots_T))
        num_rows, token_ids_T = len(slots_T), np.zeros(len(slots_T), dtype=np.int64)
        step = StepArguments(num_rows=num_rows, token_ids=address(token_ids_T), groups=groups)
        program.run(step, self._threads.choose(program.work * num_rows))
