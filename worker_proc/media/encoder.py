"""`MediaEncoder`: encodes the media of a step to rows of prompts. Results stay until the core evicts them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.protocol.errors import ProtocolError
from octavo.protocol.ids import SlotId
from octavo.protocol.media import PRECOMPUTED_ROWS, EncoderInput, Kind, StepMedia
from octavo.worker_proc.batch.inputs import MediaRows
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.media.attended import AttendedItems
from octavo.worker_proc.models.audio.item_encoder import ItemEncoder
from octavo.worker_proc.models.vision.tower import Floats, MediaTower


class KindRunner(Protocol):
    """Runs the encoder of one or several kinds of media."""

    @property
    def tower(self) -> MediaTower | ItemEncoder:
        """Tower or encoder that it runs."""

    def encode(self, inputs: Sequence[EncoderInput]) -> list[Tensor]:
        """Return the rows of each item, before `arrange` of the tower.

        Raises:
            ProtocolError: an item is too large, or has not the tensors of the model's processor.
        """

    def warm_up(self) -> None:
        """Do the work that would delay the first run."""


class PendingVector:
    """The vector of an item. The host makes it after the step is over, when its rows are readable.

    Args:
        make: makes the vector; dropped after its first call, together with the rows that it holds.
    """

    def __init__(self, make: Callable[[], Floats]) -> None:
        self._make: Callable[[], Floats] | None = make
        self._vector_D: Floats | None = None

    def __call__(self) -> Floats:
        """Return the vector."""
        if self._make is not None:
            self._vector_D, self._make = self._make(), None
        assert self._vector_D is not None, "made above"
        return self._vector_D


class MediaEncoder:
    """The encoder of one worker.

    Args:
        towers: tower of each kind of media; one tower may serve several kinds.
        attended: takes the results for cross-attention; `None` if they become rows of prompts.
        stream: stream of the device; `None` if the host computes.
    """

    def __init__(
        self,
        towers: Mapping[Kind, KindRunner],
        attended: AttendedItems | None = None,
        stream: Stream | None = None,
    ) -> None:
        self._towers, self._attended, self._stream = towers, attended, stream
        self._results: dict[bytes, Tensor] = {}
        """Rows by digest, in the type of the model and on its device."""
        self._vectors: dict[bytes, PendingVector] = {}
        """Vectors by digest, if the towers make vectors."""
        heads = [runner.tower.pooling_head for runner in towers.values() if runner.tower.pooling_head is not None]
        self._makes_vectors = bool(heads)
        for head in heads:
            head.prepare()

    def warm_up(self) -> None:
        """Do the work that would delay the first run of each tower."""
        for runner in dict.fromkeys(self._towers.values()):
            runner.warm_up()

    def rows_of_step(self, media: StepMedia) -> MediaRows:
        """Encode the media that a step requests, and return its media rows.

        Raises:
            ProtocolError: the core and this worker disagree about the kept results.
        """
        for digest in media.evicted:
            if not self._evict(digest):
                raise ProtocolError(f"media {digest.hex()[:16]} was evicted but is not kept")
        for item in [one for one in media.inputs if PRECOMPUTED_ROWS in one.tensors]:
            self._results[item.digest] = self._given_rows(item)
        if encoded := [item for item in media.inputs if PRECOMPUTED_ROWS not in item.tensors]:
            self._encode(encoded)
        if self._makes_vectors:
            return []
        return [
            (slot, position, self._kept(media.digests[index], first + num_rows)[first : first + num_rows])
            for slot, position, num_rows, index, first in media.places
        ]

    def vectors_of_step(self, media: StepMedia) -> dict[SlotId, PendingVector]:
        """Return the vectors of requests that are an image alone, by slot. Call `rows_of_step` first.

        Raises:
            ProtocolError: an item is not kept.
        """
        if not self._makes_vectors:
            return {}
        digests = {slot: media.digests[index] for slot, _, _, index, _ in media.places}
        for digest in digests.values():
            if digest not in self._vectors:
                raise ProtocolError(f"the vector of media {digest.hex()[:16]} is needed but not kept")
        return {slot: self._vectors[digest] for slot, digest in digests.items()}

    def attended_places(self, media: StepMedia) -> list[tuple[int, int]]:
        """Return slots of requests, and the cross-attention cache indices of the items that they attend to.

        Raises:
            ProtocolError: an item is not kept.
        """
        if self._attended is None:
            return []
        return [(slot, self._attended.place_of(media.digests[index])) for slot, index in media.attended]

    def _evict(self, digest: bytes) -> bool:
        """Drop an item. Return whether it was kept."""
        if self._attended is not None:
            return self._attended.evict(digest)
        kept: dict[bytes, Any] = self._vectors if self._makes_vectors else self._results
        return kept.pop(digest, None) is not None

    def _kept(self, digest: bytes, num_rows: int) -> Tensor:
        """Return the kept rows of an item, at least `num_rows`."""
        rows = self._results.get(digest)
        if rows is None or num_rows > len(rows):
            raise ProtocolError(f"rows of media {digest.hex()[:16]} are needed but not kept")
        return rows

    def _given_rows(self, item: EncoderInput) -> Tensor:
        """Return rows that a caller computed and the core checked."""
        rows, tower = item.tensors[PRECOMPUTED_ROWS], self._towers[item.kind].tower
        host_RD = torch.frombuffer(bytearray(rows.data.data), dtype=tower.dtype).view(rows.shape)
        return host_RD.to(tower.device)

    def _encode(self, inputs: Sequence[EncoderInput]) -> None:
        for runner in dict.fromkeys(self._towers.values()):
            if not (own := [item for item in inputs if self._towers[item.kind] is runner]):
                continue
            for item, rows_RD in zip(own, runner.encode(own), strict=True):
                self._keep(item, rows_RD, runner.tower)

    def _keep(self, item: EncoderInput, rows_RD: Tensor, tower: MediaTower | ItemEncoder) -> None:
        if self._attended is not None:
            self._attended.put(item.digest, rows_RD)
            return
        if (head := tower.pooling_head) is not None:
            rows_RD = rows_RD.float()
            host_RD = rows_RD if self._stream is None else self._stream.download(rows_RD)
            # The vector outlives the request: it must not hold the tensors of the item, which `arrange` does not read.
            vector = PendingVector(lambda: head(tower.arrange(host_RD, {})[0].numpy()))
            if self._stream is None:
                vector()
            self._vectors[item.digest] = vector
            return
        rows = tower.arrange(rows_RD, item.tensors).to(tower.dtype)
        if len(rows) != item.num_rows:
            raise ProtocolError(f"media {item.digest.hex()[:16]} has {len(rows)} rows, not {item.num_rows}")
        self._results[item.digest] = rows
