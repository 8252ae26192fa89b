"""`Constraint`: tracks one output through its free prefix and its grammar, and says which tokens are allowed next."""

from collections.abc import Iterator, Sequence
from copy import copy
from typing import TYPE_CHECKING

from octavo.core_proc.grammar.free_prefix import FreePrefix
from octavo.core_proc.request import Request
from octavo.protocol.ids import IdArray, TokenId, pack_ids
from octavo.protocol.requests import ModelVocabulary
from octavo.protocol.structured import GrammarSpec

if TYPE_CHECKING:
    from octavo.core_proc.grammar.matcher import Matcher


class Constraint:
    """A live request, its free prefix, and its matcher. The matcher is `None` if the only constraint is the length of
    the prefix.

    The state depends only on the request's known outputs, including those of a resumed request. So preemption does not
    change it.
    """

    def __init__(
        self, request: Request, matcher: "Matcher | None", spec: GrammarSpec, vocabulary: ModelVocabulary
    ) -> None:
        self.request = request
        self.param = spec.param
        self.has_accepted_all = True
        """False after an output was not allowed."""
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
        """True if every token is allowed from now on."""
        return self._prefix.is_over and self._matcher is None

    @property
    def is_complete(self) -> bool:
        """True if the grammar allows nothing more."""
        return self._prefix.is_over and self._matcher is not None and self._matcher.is_complete

    @property
    def is_behind(self) -> bool:
        """True if the request has received tokens since the last `advance`."""
        return len(self.request.token_ids) != self._length_seen

    @property
    def needs_mask(self) -> bool:
        """True if some tokens are not allowed next."""
        if self._prefix.is_over:
            return self._matcher is not None
        return self._prefix_mask is not None or self._prefix.forced_token_id is not None

    @property
    def fault(self) -> str:
        """Why the grammar cannot continue. Empty while it can."""
        return self._matcher.fault if self._matcher is not None else ""

    def allows_all_after(self, num_outputs: int) -> bool:
        """Return whether every token is allowed after this many outputs, whatever they are."""
        return self._matcher is None and self._prefix.is_unforced_after(num_outputs)

    def advance(self) -> None:
        """Accept the outputs that became known since the last call."""
        self._length_seen = len(self.request.token_ids)
        num_known = self.request.num_known_outputs
        if num_known == self._num_accepted:
            return
        token_ids = self.request.token_ids[self.request.num_prompt_tokens + self._num_accepted :]
        self._num_accepted = num_known
        for token_id in token_ids:
            if not self._accept(token_id):
                self.has_accepted_all = False
                return

    def next_mask(self) -> bytes | None:
        """Return the mask of the tokens allowed next. Return None if all are allowed, b"" if none is.

        End-of-sequence tokens are not allowed before the grammar begins. Within the grammar, they are allowed where it
        may end.
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

    def continuation(self, proposed: Sequence[TokenId], num_tokens: int) -> IdArray:
        """Return a draft of the tokens that follow the known ones, at most `num_tokens`. It may be empty.

        It begins with the proposed tokens, as far as the grammar allows them. It excludes the token that completes the
        output: that token is sampled after the drafts, and nothing may follow it.
        """
        state, draft = self._fork() if proposed else self, pack_ids()
        for token_id in proposed[:num_tokens]:
            if not state._accept(token_id):
                break
            if state.is_complete:
                return draft
            draft.append(token_id)
        if not state._prefix.is_over and state._prefix.forced_token_id is not None:
            state = self._fork() if state is self else state
            while len(draft) < num_tokens and (forced := state._prefix.forced_token_id) is not None:
                state._prefix.accept(forced)
                draft.append(forced)
        if state._prefix.is_over and state._matcher is not None and len(draft) < num_tokens:
            draft.extend(state._matcher.continuation(num_tokens - len(draft)))
        return draft

    def masks_after(self, draft: Sequence[TokenId]) -> Iterator[bytes | None]:
        """Yield `next_mask` after 1, 2, ... tokens of a draft: b"" after a token that is not allowed."""
        state, is_fitting = self._fork(), True
        for token_id in draft:
            is_fitting = is_fitting and state._accept(token_id) and not state.is_complete
            yield state.next_mask() if is_fitting else b""

    def _accept(self, token_id: TokenId) -> bool:
        """Accept an output. Return False and change nothing if it is not allowed."""
        if not self._prefix.is_over:
            return self._prefix.accept(token_id)
        return self._matcher is None or self._matcher.accept(token_id)

    def _fork(self) -> "Constraint":
        """Return a copy that advances independently."""
        fork = copy(self)
        fork._prefix = copy(self._prefix)
        fork._matcher = self._matcher and self._matcher.copy()
        return fork

    def _mask_without_eos(self) -> bytes | None:
        """Return a mask that excludes the end-of-sequence tokens. Return None if there are none. Stop tokens may end a
        prefix."""
        eos_token_ids = [token_id for token_id in self.request.sampling.eos_token_ids if token_id < self._vocab_size]
        if not eos_token_ids:
            return None
        bits = (1 << self._vocab_size) - 1
        for token_id in eos_token_ids:
            bits &= ~(1 << token_id)
        return self._mask_of(bits)

    def _mask_of(self, bits: int) -> bytes:
        return bits.to_bytes(4 * -(-self._vocab_size // 32), "little")
