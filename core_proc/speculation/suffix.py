"""Suffix decoding: drafts the most frequent continuation of the longest match, in the request and in recent outputs.

After SuffixDecoding (Oliaro et al. 2024) and its implementation in Arctic Inference, with lists of occurrences instead
of suffix trees.
"""

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

import msgspec

from octavo.core_proc.request import Request
from octavo.core_proc.speculation.match_index import MatchIndex, match_length
from octavo.protocol.config.speculation import ResolvedSpeculation
from octavo.protocol.ids import IdArray, TokenId, pack_ids

NGRAM_TOKENS = 3
"""Length of the shortest match."""

GENERATION_TOKENS = 1 << 17
"""Tokens of recent outputs in each of two generations: about 20 MB."""

MAX_OUTPUT_TOKENS = 4096
"""Number of tokens kept at the end of each output, so that adding an output does not delay a step noticeably."""

_END = -1
"""Separates two outputs."""


class Corpus:
    """Outputs of requests that have ended. Only requests of the same domain find them."""

    def __init__(self) -> None:
        self.token_ids: IdArray = pack_ids()
        self._starts: list[int] = []
        self._domains: list[int] = []
        self._index = MatchIndex(NGRAM_TOKENS, GENERATION_TOKENS)

    @property
    def num_outputs(self) -> int:
        """Number of outputs that were added."""
        return len(self._starts)

    def add(self, domain: int, token_ids: IdArray) -> None:
        """Add an output of less than `MAX_OUTPUT_TOKENS` tokens."""
        self._starts.append(len(self.token_ids))
        self._domains.append(domain)
        self.token_ids.extend(token_ids)
        self.token_ids.append(_END)
        self._index.extend(self.token_ids, len(self.token_ids) - 1, domain)

    def find(self, domain: int, token_ids: IdArray) -> Iterator[int]:
        """Yield possible occurrences of the last tokens of a request, the latest first."""
        for end in self._index.find(token_ids, domain):
            if self._domains[bisect_left(self._starts, end) - 1] == domain:
                yield end


class SuffixProposer:
    """Looks up the last tokens of a request in the request itself and in two generations of recent outputs.

    When the younger generation is full, it replaces the older one, which is dropped.

    Args:
        config: the limits.
    """

    def __init__(self, config: ResolvedSpeculation) -> None:
        self._max_match = config.suffix_max_tree_depth
        self._spec_factor = config.suffix_max_spec_factor
        self._min_probability = config.suffix_min_token_prob
        self._max_outputs = -(-config.suffix_max_cached_requests // 2)
        """Most outputs per generation; 0 if no outputs are kept."""
        self._indexes: dict[Request, MatchIndex] = {}
        self._young, self._old = Corpus(), Corpus()

    def propose(self, request: Request, num_tokens: int) -> IdArray | None:
        """Return the most frequent continuation of the longest match. Return None if there is no match."""
        index = self._indexes.get(request)
        if index is None:
            index = self._indexes[request] = MatchIndex(NGRAM_TOKENS, request.max_num_tokens)
        token_ids = request.token_ids
        if not index.extend(token_ids, len(token_ids) - 1):
            return None
        longest, places = NGRAM_TOKENS, list[tuple[IdArray, int]]()
        for source, end in self._occurrences(request, index):
            length = match_length(token_ids, source, end, self._max_match)
            if length > longest:
                longest, places = length, []
            if length == longest:
                places.append((source, end))
        return self._vote(places, min(num_tokens, int(longest * self._spec_factor)))

    def forget(self, request: Request) -> None:
        """Drop the index of a request, and keep its output for other requests of its domain."""
        if self._indexes.pop(request, None) is None or not self._max_outputs:
            return
        first = max(request.num_prompt_tokens, len(request.token_ids) - MAX_OUTPUT_TOKENS + 1)
        if len(request.token_ids) - first <= NGRAM_TOKENS:
            return
        young = self._young
        if young.num_outputs >= self._max_outputs or len(young.token_ids) >= GENERATION_TOKENS:
            self._old, self._young = young, Corpus()
        self._young.add(_domain(request), request.token_ids[first:])

    def _occurrences(self, request: Request, index: MatchIndex) -> Iterator[tuple[IdArray, int]]:
        """Yield sequences and positions in them: first in the request itself, then in younger and in older outputs."""
        token_ids = request.token_ids
        for end in index.find(token_ids):
            yield token_ids, end
        if not self._max_outputs:
            return
        domain = _domain(request)
        for corpus in (self._young, self._old):
            for end in corpus.find(domain, token_ids):
                yield corpus.token_ids, end

    def _vote(self, places: list[tuple[IdArray, int]], num_tokens: int) -> IdArray | None:
        """Follow the most frequent next token while it is probable enough. Of equally frequent tokens, the latest
        wins."""
        draft, probability = pack_ids(), 1.0
        while places and len(draft) < num_tokens:
            votes: Counter[TokenId] = Counter()
            following = [(source, end, source[end]) for source, end in places if end < len(source)]
            votes.update(token_id for _, _, token_id in following if token_id != _END)
            if not votes:
                break
            token_id, count = votes.most_common(1)[0]  # equal counts: the one counted first
            probability *= count / len(places)
            if probability < self._min_probability:
                break
            draft.append(token_id)
            places = [(source, end + 1) for source, end, found in following if found == token_id]
        return draft or None


def _domain(request: Request) -> int:
    """Return the domain within which requests may see each other's outputs; 0 without salt and adapter."""
    keys = [(key.kind, key.value) for key in request.extra_keys]
    if not keys:
        return 0
    return int.from_bytes(hashlib.blake2b(msgspec.msgpack.encode(keys), digest_size=16).digest(), "little")
