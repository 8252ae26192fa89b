"""`FreePrefix`: the part of an output before its grammar begins, such as a model's reasoning.

Knows no grammar. The prefix ends with a marker, which the model writes itself or is forced to write.
"""

from octavo.protocol.ids import TokenId
from octavo.protocol.requests import ModelVocabulary
from octavo.protocol.structured import GrammarSpec


def can_force_marker(spec: GrammarSpec, vocabulary: ModelVocabulary) -> bool:
    """Return whether the tokens that force the end of the prefix spell its marker."""
    token_ids = spec.start_after_token_ids
    if not token_ids or not 0 <= min(token_ids) <= max(token_ids) < len(vocabulary.tokens):
        return False
    return bool(spec.start_after) and spec.start_after in b"".join(map(vocabulary.tokens.__getitem__, token_ids))


class FreePrefix:
    """The tokens of one output up to and including a marker. It is over from the start if there is no marker.

    Args:
        spec: the markers, and the number of tokens after which the first marker is forced.
        vocabulary: the model's vocabulary.
    """

    def __init__(self, spec: GrammarSpec, vocabulary: ModelVocabulary) -> None:
        self.is_over = not spec.start_after
        """True after a marker has occurred."""
        self._vocabulary = vocabulary
        self._markers = (spec.start_after, *spec.other_markers)
        self._marker_token_ids = spec.start_after_token_ids
        self._max_tokens = spec.max_free_tokens
        self._num_tokens = 0
        self._tail = b""
        """The latest bytes, as many as may be the beginning of a marker."""
        self._max_tail = max(map(len, self._markers)) - 1

    @property
    def forced_token_id(self) -> TokenId | None:
        """The only token allowed next: part of the marker, once the prefix has reached its maximum length. None if any
        token is allowed."""
        if self._max_tokens is None or self.is_over or self._num_tokens < self._max_tokens:
            return None
        return self._marker_token_ids[(self._num_tokens - self._max_tokens) % len(self._marker_token_ids)]

    def is_unforced_after(self, num_outputs: int) -> bool:
        """Return whether the length limit does not force the next token after this many outputs, whatever they are."""
        return self._max_tokens is None or num_outputs < self._max_tokens

    def accept(self, token_id: TokenId) -> bool:
        """Accept a token. Return False if another one was forced. Text after the marker in the same token belongs to
        the prefix."""
        if self.forced_token_id not in (None, token_id):
            return False
        self._num_tokens += 1
        self._tail += self._vocabulary.tokens[token_id]
        if any(marker in self._tail for marker in self._markers):
            self.is_over = True
            self._tail = b""
        else:
            self._tail = self._tail[-self._max_tail :] if self._max_tail > 0 else b""
        return True
