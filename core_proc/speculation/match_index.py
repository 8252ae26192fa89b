"""`MatchIndex`: where the last tokens of a sequence have occurred before, as LZ77 compressors find it."""

from array import array
from collections.abc import Iterator

from octavo.protocol.ids import IdArray

MAX_CANDIDATES = 16
"""Earlier occurrences that are looked at, the latest first. Bounds the time for text such as `, , , ,`."""

MAX_INDEXED = 4096
"""Tokens that one call adds: a long prompt is indexed over several steps, none of which it delays by more than a few
milliseconds."""

MAX_HEADS = 1 << 16
"""Longer sequences have longer lists for each hash."""


class MatchIndex:
    """The places of all n-grams in a sequence that grows.

    Places with equal hashes are a linked list, the latest first. Hashes are those of tuples of integers, which are the
    same in every process. Takes about 8 bytes for each token.

    Args:
        size: tokens of an n-gram; shorter matches are not found.
        most: length that the sequence may reach.
    """

    def __init__(self, size: int, most: int) -> None:
        self.size = size
        num_heads = 1 << min(most, MAX_HEADS).bit_length()
        self._mask = num_heads - 1
        self._latest = array("i", [-1]) * num_heads
        """By hash: the end of its latest n-gram, which is the index of the token after it."""
        self._previous = array("i")
        """By end: that of the n-gram before with the same hash, -1 if there is none."""

    def extend(self, token_ids: IdArray, end: int, domain: int = 0) -> bool:
        """Add the n-grams that end at or before `end`, at most `MAX_INDEXED` of them.

        Args:
            token_ids: the sequence, which only grows.
            end: most tokens of it to add.
            domain: n-grams of different ones rarely find each other.

        Returns:
            Whether all of them are added.
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
        """Yield where the last n-gram of `token_ids` may have ended before, the latest place first.

        Another n-gram may have the same hash: `match_length` tells.
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
    """Return how many last tokens of `token_ids` equal those of `source` before `end`, at most `most`."""
    length, last, most = 0, len(token_ids), min(most, end, len(token_ids))
    while length < most and source[end - 1 - length] == token_ids[last - 1 - length]:
        length += 1
    return length
