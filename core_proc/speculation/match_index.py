"""`MatchIndex`: finds earlier occurrences of the last tokens of a sequence, as LZ77 compressors do."""

from array import array
from collections.abc import Iterator

from octavo.protocol.ids import IdArray

MAX_CANDIDATES = 16
"""Number of earlier occurrences that are tried, the latest first. Bounds the time for text such as `, , , ,`."""

MAX_INDEXED = 4096
"""Most tokens that one call adds. A long prompt is indexed over several steps, each delayed by a few milliseconds at
most."""

MAX_HEADS = 1 << 16
"""Most hash buckets. Longer sequences have longer chains per bucket."""


class MatchIndex:
    """The positions of all n-grams in a growing sequence.

    Positions with equal hashes form a linked list, the latest first. Hashes are those of integer tuples, which are the
    same in every process. Needs about 8 bytes per token.

    Args:
        size: tokens of an n-gram. Shorter matches are not found.
        most: longest length that the sequence may reach.
    """

    def __init__(self, size: int, most: int) -> None:
        self.size = size
        num_heads = 1 << min(most, MAX_HEADS).bit_length()
        self._mask = num_heads - 1
        self._latest = array("i", [-1]) * num_heads
        """By hash: the end of its latest n-gram, i.e. the index of the token after it; -1 if there is none."""
        self._previous = array("i")
        """By end of an n-gram: the end of the previous n-gram with the same hash; -1 if there is none."""

    def extend(self, token_ids: IdArray, end: int, domain: int = 0) -> bool:
        """Add the n-grams that end at or before `end`, at most `MAX_INDEXED` of them.

        Args:
            token_ids: the sequence, which only grows.
            end: number of its leading tokens to index.
            domain: n-grams of different domains rarely match each other.

        Returns:
            Whether all of them were added.
        """
        latest, previous, size, mask = self._latest, self._previous, self.size, self._mask
        first = len(previous)
        last = min(end + 1, first + MAX_INDEXED)
        if first < size <= last:
            previous.extend([-1] * (size - first))
            first = size
        for index in range(first, last):
            head = hash((domain, *token_ids[index - size : index])) & mask
            previous.append(latest[head])
            latest[head] = index
        return last == end + 1

    def find(self, token_ids: IdArray, domain: int = 0) -> Iterator[int]:
        """Yield possible earlier ends of the last n-gram of `token_ids`, the latest first.

        Different n-grams may have the same hash: verify each candidate with `match_length`.
        """
        if len(token_ids) < self.size:
            return
        end = self._latest[hash((domain, *token_ids[-self.size :])) & self._mask]
        for _ in range(MAX_CANDIDATES):
            if end < 0:
                return
            yield end
            end = self._previous[end]


def match_length(token_ids: IdArray, source: IdArray, end: int, most: int) -> int:
    """Return how many tokens at the end of `token_ids` equal those of `source` before `end`, at most `most`."""
    length, last, most = 0, len(token_ids), min(most, end, len(token_ids))
    while length < most and source[end - 1 - length] == token_ids[last - 1 - length]:
        length += 1
    return length
