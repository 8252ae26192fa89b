"""`MediaEncoder`: media of a step to rows of its prompts, whose results stay until the core evicts them."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.protocol.buffers import Buffer
from octavo.protocol.errors import ProtocolError
from octavo.protocol.ids import SlotId
from octavo.protocol.media import EncoderInput, StepMedia
from octavo.protocol.prompt_embeds import StepEmbeds
from octavo.worker_proc.batch.inputs import GroupInputs, Ints, StepInputs
from octavo.worker_proc.media.attended import AttendedItems
from octavo.worker_proc.media.projector import Projector
from octavo.worker_proc.models.vision.tower import MAX_RUN_SEQUENCES, Floats, Patches, VisionTower
from octavo.worker_proc.runners.host import Forward

Sequences = list[tuple[int, Patches]]
"""Sequences of a run, each with the index of its item."""


class MediaEncoder:
    """The encoder of one worker.

    Args:
        tower: of the model.
        forward: computes the tower.
        block_size: of the tower's cache.
        num_threads: most threads of a run.
        attended: takes the results, with cross-attention; None: they are rows of prompts.
    """

    def __init__(
        self,
        tower: VisionTower,
        forward: Forward,
        block_size: int,
        num_threads: int,
        attended: AttendedItems | None = None,
    ) -> None:
        self._attended = attended
        self._tower, self._forward, self._block_size = tower, forward, block_size
        self._projectors: list[Projector] = []
        """The first makes rows of prompts, the others those that come beside them."""
        if (merged := tower.merged) is not None:
            projects = [merged.project, *merged.deeper]
            self._projectors = [Projector(tower, merged.num_merged, one, num_threads) for one in projects]
        self._results: dict[bytes, Tensor] = {}
        """Rows by digest, in the type of the model; or one vector each in float32."""
        if tower.pooling_head is not None:
            tower.pooling_head.prepare()

    def rows_of_step(self, media: StepMedia, embeds: StepEmbeds | None) -> StepEmbeds | None:
        """Encode what a step asks for, and return its given rows.

        Args:
            media: of the step.
            embeds: rows that other requests of the step give.

        Raises:
            ProtocolError: the core and this worker do not agree on what is kept.
        """
        for digest in media.evicted:
            is_kept = self._attended.evict(digest) if self._attended else self._results.pop(digest, None) is not None
            if not is_kept:
                raise ProtocolError(f"media {digest.hex()[:16]} was evicted but is not kept")
        if media.inputs:
            self._encode(media.inputs)
        if self._tower.pooling_head is not None:
            return embeds
        places = [] if embeds is None else list(embeds.places)
        parts: list[bytes | bytearray | memoryview] = [] if embeds is None else [embeds.data.data]
        for slot, position, num_rows, index, first in media.places:
            rows = self._kept(media.digests[index], first + num_rows)
            places.append((slot, position, num_rows))
            parts.append(rows[first : first + num_rows].view(torch.uint8).numpy().tobytes())
        return StepEmbeds(places, Buffer(b"".join(parts))) if places else None

    def vectors_of_step(self, media: StepMedia) -> dict[SlotId, Floats]:
        """Return the vectors of requests that are an image alone, by slot; call `rows_of_step` before.

        Raises:
            ProtocolError: an item is not kept.
        """
        if self._tower.pooling_head is None:
            return {}
        return {slot: self._kept(media.digests[index], 1)[0].numpy() for slot, _, _, index, _ in media.places}

    def attended_places(self, media: StepMedia) -> list[tuple[int, int]]:
        """Return slots of requests and the places, in the cache of cross-attention, of the items they attend to.

        Raises:
            ProtocolError: an item is not kept.
        """
        if self._attended is None:
            return []
        return [(slot, self._attended.place_of(media.digests[index])) for slot, index in media.attended]

    def _kept(self, digest: bytes, num_rows: int) -> Tensor:
        """Return what is kept of an item; it has at least so many rows."""
        rows = self._results.get(digest)
        if rows is None or num_rows > len(rows):
            raise ProtocolError(f"rows of media {digest.hex()[:16]} are needed but not kept")
        return rows

    def _encode(self, inputs: Sequence[EncoderInput]) -> None:
        found: list[list[Floats]] = [[] for _ in inputs]
        for run in self._runs(inputs):
            for (index, _), part in zip(run, self._run([patches for _, patches in run]), strict=True):
                found[index].append(part)
        for item, parts in zip(inputs, found, strict=True):
            if self._attended is not None:
                self._attended.put(item.digest, np.concatenate(parts))
                continue
            arranged = self._tower.arrange(np.concatenate([*parts, *self._learned_rows()]), item.tensors)
            if (head := self._tower.pooling_head) is not None:
                rows = torch.from_numpy(np.stack([head(row_D) for row_D in arranged]))
            else:
                rows = torch.from_numpy(arranged).to(self._tower.dtype)
            if len(rows) != item.num_rows:
                raise ProtocolError(f"media {item.digest.hex()[:16]} has {len(rows)} rows, not {item.num_rows}")
            self._results[item.digest] = rows

    def _learned_rows(self) -> Iterator[Floats]:
        """Yield rows of the prompt that are the same for all items."""
        merged = self._tower.merged
        if merged is not None and merged.learned_XD is not None:
            yield self._projectors[0](np.repeat(merged.learned_XD.float().numpy(), merged.num_merged, axis=0))

    def _runs(self, inputs: Sequence[EncoderInput]) -> Iterator[Sequences]:
        """Yield the sequences of all items, as many as a run has room for."""
        run: Sequences = []
        num_left = self._tower.max_rows
        for index, item in enumerate(inputs):
            for patches in self._tower.patches(item.tensors):
                num_rows = len(patches.positions_T)
                if num_rows > self._tower.max_item_rows:
                    raise ProtocolError(
                        f"a media item of {num_rows} patches; the tower has {self._tower.max_item_rows}"
                    )
                if num_rows > num_left or len(run) == MAX_RUN_SEQUENCES:
                    yield run
                    run, num_left = [], self._tower.max_rows
                run.append((index, patches))
                num_left -= num_rows
        yield run

    def _run(self, sequences: Sequence[Patches]) -> list[Floats]:
        """Compute sequences that do not see each other, and return the chosen rows of each."""
        lengths = np.array([len(one.positions_T) for one in sequences])
        parts = [[len(one.positions_T)] if one.part_lengths is None else one.part_lengths for one in sequences]
        part_lengths, num_parts = np.concatenate(parts), [len(one) for one in parts]
        self._tower.put(sequences)
        # Parts are the requests of the step. Where a part sees the whole sequence, it has the blocks of that.
        slots_T, table = self._blocks_of(lengths)
        num_keys = np.array([len(one.positions_T) if one.num_keys is None else one.num_keys for one in sequences])
        whole = GroupInputs(slots_T, np.repeat(table, num_parts, axis=0), np.repeat(num_keys, num_parts))
        local = GroupInputs(*self._blocks_of(part_lengths))
        inputs = StepInputs(
            token_ids_T=np.zeros(lengths.sum(), dtype=np.int64),
            positions_T=np.concatenate([one.positions_T for one in sequences]),
            query_starts=np.concatenate(([0], part_lengths.cumsum())),
            context_lens=part_lengths,
            slots_T=np.repeat(np.arange(len(part_lengths)), part_lengths),
            groups=tuple(local if group.shape.is_local else whole for group in self._tower.cache_groups),
        )
        self._forward.run(inputs)
        starts = np.concatenate(([0], lengths.cumsum()))
        chosen = [start + one.chosen_R for start, one in zip(starts, sequences, strict=False)]
        rows: Floats = self._forward.logits(chosen_R := np.concatenate(chosen)).numpy().copy()
        lengths = np.array([len(one) for one in chosen])
        if self._tower.merged is not None:
            features = self._forward.features if self._tower.features else ()
            deeper = [one[torch.from_numpy(chosen_R)].float().numpy() for one in features]
            projected = [project(one) for project, one in zip(self._projectors, [rows, *deeper], strict=True)]
            rows, lengths = np.concatenate(projected, axis=1), lengths // self._tower.merged.num_merged
        return np.split(rows, lengths.cumsum()[:-1])

    def _blocks_of(self, lengths: Ints) -> tuple[Ints, npt.NDArray[np.int32]]:
        """Return the slot of each row, and the block table, of sequences that each begin in a block of their own."""
        num_blocks = -(-lengths // self._block_size)
        first_blocks = num_blocks.cumsum() - num_blocks
        # Entries behind the blocks of a sequence are padding, which must be a valid block.
        table = np.minimum(first_blocks[:, None] + np.arange(num_blocks.max()), num_blocks.sum() - 1)
        offsets_T = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
        return np.repeat(first_blocks * self._block_size, lengths) + offsets_T, table.astype(np.int32)
