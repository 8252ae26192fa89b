"""Finds the requests of a step that share keys at their beginning. Pure: numpy, no GPU, no torch.

Requests share blocks through the prefix cache. The label of a segment identifies the blocks that it lies in and all
blocks before. Requests with equal labels at some segment have the same keys up to there. Labels change only when blocks
are added to a request, so a step compares one number per segment, and only for requests with the same first segment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

MAX_LEVELS = 3
"""Maximum nesting of groups, as for a system prompt, a document, and questions about it."""
_MAX_LABELS = 1 << 16
"""Maximum labels that are remembered. Forgetting one loses a chance to share, never a result."""


class SegmentLabels:
    """The labels of the segments of each slot's request; row s of `labels_SX` belongs to slot s.

    Args:
        num_slots: maximum number of requests.
        num_blocks: maximum number of blocks of a request.
        block_size: tokens of a block.
        segment: tokens of a segment.
    """

    def __init__(self, num_slots: int, num_blocks: int, block_size: int, segment: int) -> None:
        self.labels_SX = np.zeros((num_slots, max(1, num_blocks * block_size // segment)), dtype=np.int64)
        self._block_ids = np.zeros((num_slots, num_blocks), dtype=np.int32)
        self._block_size, self._segment = block_size, segment
        numbers = count(1)
        # If blocks are larger than segments, the blocks alone do not identify the segment.
        self._label_of = lru_cache(_MAX_LABELS)(lambda index, block_ids: next(numbers))

    @classmethod
    def of(cls, block_table_RP: npt.NDArray[np.int32], block_size: int, segment: int) -> Self:
        """Return the labels of a block table, whose rows are the slots."""
        labels = cls(len(block_table_RP), block_table_RP.shape[1], block_size, segment)
        for slot, block_ids in enumerate(block_table_RP):
            labels.write(slot, 0, block_ids)
        return labels

    def write(self, slot: int, start: int, block_ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Label the segments that are complete once a slot has these blocks, which follow its first `start` blocks."""
        end = start + len(block_ids)
        blocks, size, segment = self._block_ids[slot], self._block_size, self._segment
        blocks[start:end] = block_ids
        for index in range(start * size // segment, end * size // segment):
            first, last = index * segment // size, ((index + 1) * segment - 1) // size
            self.labels_SX[slot, index] = self._label_of(index, blocks[first : last + 1].tobytes())


@dataclass(frozen=True, slots=True, eq=False)
class Prefixes:
    """The labels of a step's requests; those of request r are row `slots_R[r]` of `labels_SX`."""

    labels_SX: Ints
    slots_R: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Entries that share segments, in N groups. An entry can be in several groups, each with later segments."""

    members: Ints
    """Indices of entries; those of a group are adjacent."""
    first_members: Ints
    """N; index of each group's first member in `members`."""
    num_members: Ints
    """N; number of members."""
    first_segments: Ints
    """N; first shared segment."""
    end_segments: Ints
    """N; end of the shared segments."""
    depths_E: Ints
    """For each entry, how many of its first segments it shares."""


def find_groups(  # long: one algorithm, whose arrays all have the order of the members
    labels_SX: Ints, slots_E: Ints, limits_E: Ints, segments_E: Ints, partial_cost: float
) -> Groups | None:
    """Return groups of entries with equal labels; `None` if nothing is shared.

    Args:
        labels_SX: see `SegmentLabels`.
        slots_E: slots of the entries.
        limits_E: how many of its first segments each entry may share.
        segments_E: number of segments of each entry.
        partial_cost: cost of storing and adding the sums of one entry over a segment, in units of reading a segment.
    """
    members = _sharing_entries(labels_SX, slots_E, limits_E)
    if not len(members):
        return None
    limits = limits_E[members]
    labels_MX = labels_SX[slots_E[members], : limits.max()]
    order, depths = np.arange(len(members)), np.zeros(len(members), np.int64)
    groups_of = depths
    levels: list[tuple[Ints, Ints, Ints, Ints]] = []
    for level in range(MAX_LEVELS):
        # Sort each group by the label after the segments that all its members share; members without such a label are
        # alone.
        is_labelled = depths < limits[order]
        labels = np.where(is_labelled, labels_MX[order, np.where(is_labelled, depths, 0)], -1 - order)
        by_label = np.lexsort((labels, groups_of))
        order, depths, groups_of, labels = order[by_label], depths[by_label], groups_of[by_label], labels[by_label]
        is_first = np.append(True, (groups_of[1:] != groups_of[:-1]) | (labels[1:] != labels[:-1]))
        firsts = is_first.nonzero()[0]
        sizes = np.diff(firsts, append=len(order))
        is_group = sizes > 1
        if not is_group.any():
            break
        groups_of = np.repeat(firsts, sizes)
        differs_MX = labels_MX[order] != labels_MX[order[groups_of]]
        agreed = np.where(differs_MX.any(axis=1), differs_MX.argmax(axis=1), labels_MX.shape[1])
        begins, ends = depths[firsts], np.minimum.reduceat(np.minimum(agreed, limits[order]), firsts)
        if level == 0:
            # Members store the sums of all their segments, which they would not need if they were alone.
            num_partials = np.add.reduceat(segments_E[members[order]], firsts)
            is_group &= (sizes - 1) * ends > partial_cost * num_partials
            limits[order[np.repeat(~is_group, sizes)]] = 0
        levels.append((firsts[is_group], sizes[is_group], begins[is_group], ends[is_group]))
        depths = np.where(np.repeat(is_group, sizes), np.repeat(ends, sizes), depths)
    if not depths.any():
        return None
    depths_E = np.zeros(len(limits_E), np.int64)
    depths_E[members[order]] = depths
    first_members, num_members, first_segments, end_segments = map(np.concatenate, zip(*levels, strict=True))
    return Groups(members[order], first_members, num_members, first_segments, end_segments, depths_E)


def items_of(groups: Groups, span: int, max_members: int) -> npt.NDArray[np.int32]:
    """Divide groups into items: first member, number of members, first segment and end of the segments of each.

    The items of a span of segments are adjacent, so that programs read it at about the same time.
    """
    tiles = -(-groups.num_members // max_members)
    spans = -(-(groups.end_segments - groups.first_segments) // span)
    group = np.repeat(np.arange(len(tiles)), tiles * spans)
    span_index, tile_index = np.divmod(_ranges(np.zeros_like(tiles), tiles * spans), tiles[group])
    items = np.empty((len(group), 4), dtype=np.int32)
    items[:, 0] = groups.first_members[group] + tile_index * max_members
    items[:, 1] = np.minimum(groups.num_members[group] - tile_index * max_members, max_members)
    items[:, 2] = groups.first_segments[group] + span_index * span
    items[:, 3] = np.minimum(items[:, 2] + span, groups.end_segments[group])
    return items


def _sharing_entries(labels_SX: Ints, slots_E: Ints, limits_E: Ints) -> Ints:
    """Return the entries that have their first segment in common with another entry; those with the same one are
    adjacent."""
    entries = (limits_E > 0).nonzero()[0]
    labels = labels_SX[slots_E[entries], 0]
    order = labels.argsort(kind="stable")
    is_next_same = np.diff(labels[order]) == 0
    if not is_next_same.any():
        return entries[:0]
    has_company = np.zeros(len(order), dtype=bool)
    has_company[:-1] = is_next_same
    has_company[1:] |= is_next_same
    found: Ints = entries[order[has_company]]
    return found


def _ranges(firsts: Ints, counts: Ints) -> Ints:
    """Return the numbers first, first + 1, ... of each range, one range after another."""
    starts: Ints = np.repeat(firsts - (counts.cumsum() - counts), counts)
    return starts + np.arange(len(starts))
