"""`Constraint`: where one output stands, first in its free prefix and then in its grammar, and what may come next."""

from typing import TYPE_CHECKING

from octavo.core_proc.grammar.free_prefix import FreePrefix
from octavo.core_proc.request import Request
from octavo.protocol.requests import ModelVocabulary
from octavo.protocol.structured import GrammarSpec

if TYPE_CHECKING:
    from octavo.core_proc.grammar.matcher import Matcher


class Constraint:
    """A live request, its free prefix, and its matcher: `None` if the only constraint is the length of the prefix.

    The state is a function of the request's known outputs alone, those of a resumed request included, so preemption
    does not change it.
    """

    def __init__(
        self, request: Request, matcher: "Matcher | None", spec: GrammarSpec, vocabulary: ModelVocabulary
    ) -> None:
        self.request = request
        self.param = spec.param
        self.has_accepted_all = True
        """False once an output did not fit."""
        self._matcher = matcher
        self._prefix = FreePrefix(spec, vocabulary)
        self._vocab_size = len(vocabulary.tokens)
        self._num_accepted = 0
        self._length_seen = 0
        ends = {*request.sampling.eos_token_ids, *request.sampling.stop_token_ids}
        self._ends = sorted(token_id for token_id in ends if token_id < self._vocab_size)
        self._prefix_mask = self._mask_without_eos() if matcher is not None and not self._prefix.is_over else None

    @property
    def is_over(self) -> bool:
        """True when any token may come from now on."""
        return self._prefix.is_over and self._matcher is None

    @property
    def is_complete(self) -> bool:
        """True when the grammar allows nothing more."""
        return self._prefix.is_over and self._matcher is not None and self._matcher.is_complete

    @property
    def is_behind(self) -> bool:
        """True when the request has got tokens since the last `advance`."""
        return len(self.request.token_ids) != self._length_seen

    @property
    def needs_mask(self) -> bool:
        """True when some tokens may not come next."""
        if self._prefix.is_over:
            return self._matcher is not None
        return self._prefix_mask is not None or self._prefix.forced_token_id is not None

    @property
    def fault(self) -> str:
        """Why the grammar cannot be followed any further; "" while it can."""
        return self._matcher.fault if self._matcher is not None else ""

    def allows_all_after(self, num_outputs: int) -> bool:
        """Return whether any token may come after so many outputs, whatever they are."""
        return self._matcher is None and self._prefix.is_unforced_after(num_outputs)

    def advance(self) -> None:
        """Accept the outputs that have become known since the last call."""
        self._length_seen = len(self.request.token_ids)
        num_known = self.request.num_known_outputs
        if num_known == self._num_accepted:
            return
        token_ids = self.request.token_ids[self.request.num_prompt_tokens + self._num_accepted :]
        self._num_accepted = num_known
        for token_id in token_ids:
            if not self._prefix.is_over:
                self.has_accepted_all = self._prefix.accept(token_id)
            elif self._matcher is not None:
                self.has_accepted_all = self._matcher.accept(token_id)
            if not self.has_accepted_all:
                return

    def next_mask(self) -> bytes | None:
        """Return the mask of the tokens that may come next: None if any may, b"" if none may.

        End-of-sequence tokens may not come before the grammar, and within it only where it may end.
        """
        if not self._prefix.is_over:
            forced = self._prefix.forced_token_id
            return self._prefix_mask if forced is None else self._mask_of(1 << forced)
        if self._matcher is None:
            return None
        mask, may_end = self._matcher.mask()
        if self._matcher.fault or not any(mask):
            return b""
        if may_end:
            for token_id in self._ends:
                mask[token_id >> 3] |= 1 << (token_id & 7)
        return bytes(mask)

    def _mask_without_eos(self) -> bytes | None:
        """Return a mask without the end-of-sequence tokens, None if there are none. Stop tokens may end a prefix."""
        eos_token_ids = [token_id for token_id in self.request.sampling.eos_token_ids if token_id < self._vocab_size]
        if not eos_token_ids:
            return None
        bits = (1 << self._vocab_size) - 1
        for token_id in eos_token_ids:
            bits &= ~(1 << token_id)
        return self._mask_of(bits)

    def _mask_of(self, bits: int) -> bytes:
        return bits.to_bytes(4 * -(-self._vocab_size // 32), "little")
