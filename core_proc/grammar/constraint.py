"""One request in its grammar: what it has generated, and what it may draw next."""

from typing import TYPE_CHECKING

from octavo.core_proc.request import Request
from octavo.protocol.ids import TokenId
from octavo.protocol.requests import Vocabulary
from octavo.protocol.structured import GrammarSpec

if TYPE_CHECKING:
    from octavo.core_proc.grammar.matcher import Matcher


def can_be_forced(spec: GrammarSpec, vocabulary: Vocabulary) -> bool:
    """Return whether the tokens that shall end what is free make the mark that does."""
    token_ids = spec.start_after_token_ids
    if not token_ids or not 0 <= min(token_ids) <= max(token_ids) < len(vocabulary.tokens):
        return False
    return bool(spec.start_after) and spec.start_after in b"".join(map(vocabulary.tokens.__getitem__, token_ids))


class Constraint:
    """A live request and its matcher, which it has none of where nothing binds it but how long its beginning is.

    The matcher's place is a function of the request's known outputs alone, those of a resumed request included, so
    it does not matter how often the request was preempted.
    """

    def __init__(self, request: Request, matcher: "Matcher | None", spec: GrammarSpec, vocabulary: Vocabulary) -> None:
        self.request = request
        self.matcher = matcher
        self.param = spec.param
        self.has_taken_all = True
        """False once an output had no place in the grammar, or in the mark that was forced."""
        self._vocabulary = vocabulary
        self._marker = spec.start_after
        self._is_free = bool(spec.start_after)
        """True until the marker after which the grammar begins."""
        self._tail = b""
        """The latest free bytes, as many as may be the beginning of a marker."""
        self._num_taken = 0
        self._length_seen = 0
        ends = {*request.sampling.eos_token_ids, *request.sampling.stop_token_ids}
        self._ends = sorted(token_id for token_id in ends if token_id < len(vocabulary.tokens))
        self._free_mask = self._all_but_ends() if self._is_free and matcher is not None else None
        self._max_free = spec.max_free_tokens
        self._marker_token_ids = spec.start_after_token_ids
        self._num_free = 0

    @property
    def is_bound(self) -> bool:
        """True where the next token must fit the grammar."""
        return not self._is_free and self.matcher is not None

    def is_free_after(self, num_outputs: int) -> bool:
        """Return whether nothing binds the token that follows so many outputs, whatever they are."""
        return self.matcher is None and (self._max_free is None or num_outputs < self._max_free)

    @property
    def is_over(self) -> bool:
        """True when nothing will ever bind this request again."""
        return not self._is_free and self.matcher is None

    @property
    def free_mask(self) -> bytes | None:
        """What may come before the grammar begins: anything but the end, or the mark. None: anything at all."""
        forced = self._forced_token_id
        return self._free_mask if forced is None else self._mask_of(1 << forced)

    @property
    def _forced_token_id(self) -> TokenId | None:
        """The only token that may come next, of the mark that ends what has been free for long enough."""
        if self._max_free is None or not self._is_free or self._num_free < self._max_free:
            return None
        return self._marker_token_ids[(self._num_free - self._max_free) % len(self._marker_token_ids)]

    @property
    def is_complete(self) -> bool:
        """True when the grammar has no place for anything more."""
        return self.matcher is not None and not self._is_free and self.matcher.is_complete

    @property
    def has_news(self) -> bool:
        """True when `advance` has not been called since the request's tokens were last added to."""
        return len(self.request.token_ids) != self._length_seen

    def advance(self) -> None:
        """Take in the outputs that have become known since the last call."""
        self._length_seen = len(self.request.token_ids)
        num_known = self.request.num_known_outputs
        if num_known == self._num_taken:
            return
        token_ids = self.request.token_ids[self.request.num_prompt_tokens + self._num_taken :]
        self._num_taken = num_known
        for token_id in token_ids:
            if self._forced_token_id not in (None, token_id):
                self.has_taken_all = False
                return
            if self._is_free:
                self._look_for_marker(token_id)
            elif self.matcher is not None and not self.matcher.take(token_id):
                self.has_taken_all = False
                return

    def allow_ends(self, mask: bytearray) -> None:
        """Add to a mask the tokens that end the request: the grammar may end here."""
        for token_id in self._ends:
            mask[token_id >> 3] |= 1 << (token_id & 7)

    def _all_but_ends(self) -> bytes | None:
        """Return a mask without the end tokens, None where there are none. Stop tokens end free text as they do any."""
        vocab_size = len(self._vocabulary.tokens)
        ends = [token_id for token_id in self.request.sampling.eos_token_ids if token_id < vocab_size]
        if not ends:
            return None
        bits = (1 << vocab_size) - 1
        for token_id in ends:
            bits &= ~(1 << token_id)
        return self._mask_of(bits)

    def _mask_of(self, bits: int) -> bytes:
        return bits.to_bytes(4 * -(-len(self._vocabulary.tokens) // 32), "little")

    def _look_for_marker(self, token_id: int) -> None:
        """Note a free token. What follows the marker within its own token is still free."""
        self._num_free += 1
        self._tail += self._vocabulary.tokens[token_id]
        if self._marker in self._tail:
            self._is_free = False
            self._tail = b""
        else:
            self._tail = self._tail[-(len(self._marker) - 1) :] if len(self._marker) > 1 else b""
