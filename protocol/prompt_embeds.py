"""Prompt embeddings: rows that replace token embeddings at some positions of a prompt.

The frontend converts and hashes them. The core passes on the rows that a step computes, without reading their values.
"""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from octavo.protocol.buffers import Buffer
from octavo.protocol.ids import SlotId, TokenId

PLACEHOLDER: TokenId = 0
"""Stands for a given row in lists of token ids, and has no meaning there."""

DIGEST_ROWS = 16
"""Number of rows that share a digest. Prompts share the cached blocks of equal rows up to a multiple of this number."""

_DIGEST_BYTES = 32

Span = tuple[int, int]
"""First position of consecutive rows in the prompt, and their number."""


class PromptEmbeds(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The rows of one prompt. A position without a row has a token."""

    spans: list[Span]
    """Spans in order of position, without overlap."""
    data: Buffer
    """All rows, concatenated: little-endian values in the data type of the model."""
    digests: list[bytes]
    """Hashes of `DIGEST_ROWS` rows each, for each span in turn. The last one of a span may cover fewer rows."""

    @classmethod
    def pack(cls, spans: Sequence[Span], data: bytes | bytearray | memoryview) -> "PromptEmbeds":
        """Return the rows with their digests. Reads all of `data`, but does not copy it."""
        view = memoryview(data).cast("B")
        size = len(view) // sum([num_rows for _, num_rows in spans])
        digests, first = [], 0
        for _, num_rows in spans:
            last = first + num_rows
            for row in range(first, last, DIGEST_ROWS):
                part = view[row * size : min(row + DIGEST_ROWS, last) * size]
                digests.append(hashlib.blake2b(part, digest_size=_DIGEST_BYTES).digest())
            first = last
        return cls(list(spans), Buffer(data), digests)

    @classmethod
    def join(cls, parts: "Sequence[tuple[int, PromptEmbeds]]") -> "PromptEmbeds":
        """Return the rows of several parts, each shifted right by a number of positions."""
        spans = [(start + position, num_rows) for start, part in parts for position, num_rows in part.spans]
        data = b"".join([part.data.data for _, part in parts])
        return cls(spans, Buffer(data), [digest for _, part in parts for digest in part.digests])

    @property
    def num_rows(self) -> int:
        """Number of rows of all spans."""
        return sum([num_rows for _, num_rows in self.spans])

    def positions(self) -> Iterable[tuple[int, bytes]]:
        """Pairs of a position and the digest of the rows from there on."""
        starts = [position + row for position, num_rows in self.spans for row in range(0, num_rows, DIGEST_ROWS)]
        return zip(starts, self.digests, strict=True)

    def without(self, token_ids: Sequence[TokenId]) -> list[TokenId]:
        """Return the tokens of a prompt at positions without a row."""
        return tokens_outside(self.spans, token_ids)

    def fault(self, num_prompt_tokens: int, num_row_bytes: int) -> str | None:
        """Return why these cannot be the rows of a prompt with this many positions. Return None if they can."""
        ends = [(0, 0), *self.spans, (num_prompt_tokens, 0)]
        if not self.spans or any(num_rows < 1 for _, num_rows in self.spans):
            return "a span of prompt_embeds has no rows"
        if any(before + num_rows > after for (before, num_rows), (after, _) in pairwise(ends)):
            return (
                f"the rows of prompt_embeds overlap, or lie outside of the {num_prompt_tokens} positions of the prompt"
            )
        if len(self.data) != self.num_rows * num_row_bytes:
            return f"{self.num_rows} rows of prompt_embeds take {num_row_bytes} bytes each, not {len(self.data)} in all"
        if len(self.digests) != sum([-(-num_rows // DIGEST_ROWS) for _, num_rows in self.spans]):
            return f"{len(self.digests)} digests came for {self.num_rows} rows of prompt_embeds"
        return None


class StepEmbeds(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The given rows that one step uses."""

    places: list[tuple[SlotId, int, int]]
    """Slot, first position, and number of rows."""
    data: Buffer
    """All rows, concatenated."""


class StepEmbedsBuilder:
    """Collects the given rows of a step from its requests."""

    def __init__(self) -> None:
        self._places: list[tuple[SlotId, int, int]] = []
        self._parts: list[memoryview] = []

    def add(self, slot: SlotId, rows: PromptEmbeds, start: int, end: int) -> None:
        """Add the rows at positions [start, end) of a request."""
        data, first = memoryview(rows.data.data).cast("B"), 0
        size = len(data) // rows.num_rows
        for position, num_rows in rows.spans:
            begin, stop = max(start, position), min(end, position + num_rows)
            if begin < stop:
                self._places.append((slot, begin, stop - begin))
                self._parts.append(data[(first + begin - position) * size : (first + stop - position) * size])
            first += num_rows

    def build(self) -> StepEmbeds | None:
        """Return the collected rows. Return None if there are none."""
        if not self._places:
            return None
        return StepEmbeds(self._places, Buffer(self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)))


def tokens_outside(spans: Sequence[Span], token_ids: Sequence[TokenId]) -> list[TokenId]:
    """Return the tokens at positions outside of all spans."""
    tokens: list[TokenId] = []
    end = 0
    for position, num_rows in spans:
        tokens += token_ids[end:position]
        end = position + num_rows
    return [*tokens, *token_ids[end:]]
