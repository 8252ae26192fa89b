"""`Speller`: predicts the tokens into which a model's tokenizer would split a text.

The core has the bytes of all tokens, but no tokenizer. The tokens are only used as drafts, so they may be wrong.
"""

import functools
import re
from collections.abc import Sequence

from octavo.protocol.ids import TokenId

MAX_KEPT = 4096
"""Number of text pieces whose tokens are cached: property names recur in every output."""

_PIECE = re.compile(rb" ?\S+|\s+(?!\S)|\s+")
"""GPT-2's splitting of white space. The other rules of tokenizers are approximated by which tokens exist."""


class Speller:
    """Byte-pair encoding where the id of a token is the rank of its merge, as in nearly all vocabularies.

    Args:
        tokens: bytes of each token id; b"" for unused ids.
        special_token_ids: tokens that are not text.
    """

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[TokenId]) -> None:
        ids: dict[bytes, TokenId] = {}
        special = frozenset(special_token_ids)
        for token_id in range(len(tokens) - 1, -1, -1):
            text = tokens[token_id]
            # SentencePiece has single bytes twice. The byte-fallback tokens come first.
            if token_id not in special and (len(text) > 1 or text not in ids):
                ids[text] = token_id
        ids.pop(b"", None)
        self._ids = ids
        self.byte_ids = sorted(
            {
                text: token_id
                for token_id, text in reversed(list(enumerate(tokens)))
                if len(text) == 1 and token_id not in special
            }.values()
        )
        """The single-byte tokens, which are adjacent in most vocabularies."""
        self._spell_piece = functools.lru_cache(MAX_KEPT)(self._merge)

    def spell(self, text: bytes) -> list[TokenId]:
        """Return the tokens of a text. Return none if no tokens spell it."""
        token_ids: list[TokenId] = []
        for piece in _PIECE.findall(text):
            if not (parts := self._spell_piece(piece)):
                return []
            token_ids += parts
        return token_ids

    def _merge(self, piece: bytes) -> tuple[TokenId, ...]:
        parts = [bytes([byte]) for byte in piece]
        while True:
            merges = [
                (token_id, index)
                for index in range(len(parts) - 1)
                if (token_id := self._ids.get(parts[index] + parts[index + 1])) is not None
            ]
            if not merges:
                is_spelled = all(part in self._ids for part in parts)
                return tuple([self._ids[part] for part in parts]) if is_spelled else ()
            _, index = min(merges)
            parts[index : index + 2] = [parts[index] + parts[index + 1]]
