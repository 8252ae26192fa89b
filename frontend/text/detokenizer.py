"""Incremental detokenization: the joined pieces are exactly the text of all tokens.

Owns the decoding state of one sequence. Independent of stop strings and requests.
"""

import codecs
from collections.abc import Iterable, Sequence

from octavo.frontend.text.tokenizer import Tokenizer

_MAX_CHARACTER_BYTES = 4


class Detokenizer:
    """Decodes one output that continues a prompt, in constant time per token.

    The bytes of the prompt's and the output's tokens are decoded as one UTF-8 text. The output gets every character
    that contains at least one of its own bytes. So if the prompt ends inside a character and the output completes it,
    the output contains the complete character; otherwise it contains nothing of it. Malformed bytes become U+FFFD, one
    for each maximal part of a character. An incomplete character at the end becomes one U+FFFD.

    Args:
        tokenizer: the tokenizer of the model.
        prompt_token_ids: token ids of the prompt; if empty, the output is a separate text, without the space that some
        tokenizers put before a text.
        skip_special_tokens: whether to omit special tokens.
        spaces_between_special_tokens: accepted for compatibility, see `Tokenizer.decode`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        del spaces_between_special_tokens
        self._tokenizer = tokenizer
        self._whole_texts = tokenizer.whole_texts
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._is_text_start = not prompt_token_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._prompt_tail = self._incomplete_tail(prompt_token_ids)
        """Bytes of an incomplete character at the end of the prompt that the output has not continued yet."""
        self._is_between_characters = False
        """Whether no byte is pending; if so, tokens that are complete characters can be looked up."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Add the next tokens; return the text that has become certain."""
        if self._is_between_characters and len(token_ids) == 1:
            (token_id,) = token_ids
            if token_id in self._hidden:
                return ""
            # perf: applies to most tokens, and costs about a tenth of the decoder.
            if (text := self._whole_texts[token_id]) is not None:
                return text
        data = self._bytes(token_ids)
        if self._prompt_tail and data:
            data = self._continue_prompt(data)
        text = self._decoder.decode(data)
        self._is_between_characters = not (self._is_text_start or self._prompt_tail or self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """Return the remaining text at the end of the output: U+FFFD for an incomplete character, else ""."""
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token_ids: Iterable[int]) -> bytes:
        parts = []
        for token_id in token_ids:
            if token_id in self._hidden or not (data := self._tokenizer.token_bytes(token_id)):
                continue
            parts.append(self._tokenizer.token_bytes(token_id, is_first=True) if self._is_text_start else data)
            self._is_text_start = False
        return b"".join(parts)

    def _continue_prompt(self, data: bytes) -> bytes:
        """Return the bytes to decode, including the prompt's last bytes if the output completes their character."""
        tail, self._prompt_tail = self._prompt_tail, b""
        # One character, or one U+FFFD for its beginning: the byte belongs to it. (The incremental decoder would take
        # the first two bytes of a surrogate, ED A0, for the beginning of a character.)
        continues = len((tail + data[:1]).decode("utf-8", "replace")) == 1
        return tail + data if continues else data

    def _incomplete_tail(self, prompt_token_ids: Sequence[int]) -> bytes:
        """Return the bytes of an incomplete character at the prompt's end."""
        end = b""
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._hidden:
                end = self._tokenizer.token_bytes(token_id) + end
            if len(end) >= _MAX_CHARACTER_BYTES:
                break
        # A byte that starts a character never continues the previous one, so cutting here is harmless.
        end = end[-_MAX_CHARACTER_BYTES:]
        return end[codecs.utf_8_decode(end, "replace", False)[1] :]
