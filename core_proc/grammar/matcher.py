"""Wrapper around llguidance: a vocabulary, compiled grammars, and the state of an output in a grammar.

Knows no requests and no time limits. Importing this module takes a noticeable part of a second, so it is imported with
the first request that has a grammar.
"""

import ctypes
import re
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from octavo.core_proc.grammar.spelling import Speller
from octavo.core_proc.grammar.white_space import white_space
from octavo.protocol.structured import GrammarKind, GrammarSpec

HEADER = '%llguidance {"no_forcing": true}\n'
"""Makes a mask exclude a token only if no valid output continues with it. By default the library forces its own choice
of tokens wherever the grammar determines the text, but the model should choose the tokens."""

MAX_TAIL = 256
"""Number of trailing output bytes in which white space is looked up."""

MAX_BYTES = 6
"""If more than this many different bytes may come next, at least two of them are not white space."""

BYTES_PER_TOKEN = 8
"""Estimated bytes per token when drafting text."""


class GrammarFault(Exception):
    """The grammar is invalid. The message is for its author."""


class GrammarTokens:
    """The bytes of all tokens, in the form for which grammars are compiled.

    Args:
        tokens: bytes of each token id; b"" for unused ids.
        special_token_ids: tokens that are not text.
    """

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[int]) -> None:
        # The library looks for these names. If there is no end token, it adds one after the last id: its bit in a mask
        # says that the output may end here.
        self.is_tokenizer_wrapper = True
        self.tokens = list(tokens)
        self.special_token_ids = list(special_token_ids)
        self.eos_token_id = self.bos_token_id = None
        self.library_form = LLTokenizer(self)
        self.vocab_size = len(tokens)
        num_words = self.library_form.vocab_size // 32 + (self.library_form.vocab_size % 32 > 0)
        self.mask = (ctypes.c_uint32 * num_words)()
        """Buffer into which the library writes masks."""
        self.num_slot_mask_bytes = 4 * -(-self.vocab_size // 32)
        self.speller = Speller(tokens, special_token_ids)
        byte_ids = self.speller.byte_ids
        self.byte_range = slice(min(byte_ids, default=0) // 8, max(byte_ids, default=0) // 8 + 1)
        """Slice of a mask, in bytes, that contains the single-byte tokens."""
        self.byte_bits = sum([1 << (token_id - 8 * self.byte_range.start) for token_id in byte_ids])
        """Bits of the single-byte tokens in this slice."""

    @classmethod
    def of_bytes(cls) -> "GrammarTokens":
        """Return a vocabulary of the 256 single bytes, for checking grammars."""
        return cls([bytes([byte]) for byte in range(256)], [])

    def __call__(self, text: str) -> list[int]:
        """Return tokens that spell a text, not necessarily as the model's tokenizer would.

        The library calls this only for grammars whose author enables forced tokens.
        """
        token_ids: list[int] = self.library_form.greedy_tokenize(text)
        return token_ids


class Matcher:
    """The state of one output in a grammar."""

    def __init__(self, tokens: GrammarTokens, library_form: LLMatcher, tail: bytes = b"") -> None:
        self._tokens = tokens
        self._library_form = library_form
        self._tail = tail
        """The latest bytes of the output, to see how it uses white space."""
        self._expected, self._completes = b"", False
        """Text that is likely to follow, and whether it completes the output. b"" if not determined yet."""

    @classmethod
    def compile(cls, tokens: GrammarTokens, source: str) -> "Matcher":
        """Return the initial state in a grammar.

        Blocks until: done; other threads run meanwhile. Only the library's own limits bound the time.

        Raises:
            GrammarFault: the source is invalid or too large.
        """
        limits = LLParserLimits(verbose_errors=False)
        matcher = cls(tokens, LLMatcher(tokens.library_form, source, log_level=0, limits=limits))
        if fault := matcher.fault:
            raise GrammarFault(_explained(fault))
        return matcher

    def copy(self) -> "Matcher":
        """Return a copy that advances independently."""
        matcher = Matcher(self._tokens, self._library_form.deep_copy(), self._tail)
        matcher._expected, matcher._completes = self._expected, self._completes
        return matcher

    def accept(self, token_id: int) -> bool:
        """Advance by one token. Return False and change nothing if the grammar does not allow it."""
        is_accepted: bool = self._library_form.try_consume_tokens([token_id]) == 1
        if is_accepted:
            text = self._tokens.tokens[token_id]
            self._tail = self._tail[-MAX_TAIL:] + text
            self._expected = self._expected[len(text) :] if self._expected.startswith(text) else b""
        return is_accepted

    def continuation(self, num_tokens: int) -> list[int]:
        """Return a draft of the next tokens, at most `num_tokens`: the text that the grammar determines.

        Optional white space is drafted as it occurred before. The token that completes the output is excluded.
        """
        if not self._expected:
            self._expected, self._completes = self._expect(num_tokens * BYTES_PER_TOKEN)
        token_ids = self._tokens.speller.spell(self._expected)
        return (token_ids[:-1] if self._completes else token_ids)[:num_tokens]

    def _expect(self, max_bytes: int) -> tuple[bytes, bool]:
        """Return the text that is likely to follow, and whether it completes the output."""
        text, form, spell = b"", self._library_form, self._tokens.speller.spell
        while (num_bytes := max_bytes - len(text)) > 0:
            found: bytes = form.compute_ff_bytes() or self._next_byte(form, self._tail + text)
            if not (token_ids := spell(found[:num_bytes])):
                break
            if form is self._library_form:
                form = form.deep_copy()
            if form.try_consume_tokens(token_ids) < len(token_ids):
                break
            text += found[:num_bytes]
        return text, form.is_stopped()

    def _next_byte(self, form: LLMatcher, output: bytes) -> bytes:
        """Return the only possible next byte other than white space, preceded by the usual white space. Return b"" if
        there is none."""
        if output[-1:].isalnum():
            return b""  # in the middle of a text or a number
        tokens = self._tokens
        # perf: single-byte tokens are adjacent, and the complete mask is a very long integer.
        bits = int.from_bytes(memoryview(self._mask_of(form)).cast("B")[tokens.byte_range], "little") & tokens.byte_bits
        found = b""
        if bits.bit_count() > MAX_BYTES:
            return found
        while bits:
            byte = tokens.tokens[8 * tokens.byte_range.start + bits.bit_length() - 1]
            bits ^= 1 << bits.bit_length() - 1
            if not byte.isspace():
                if found:
                    return b""
                found = byte
        return found and white_space(output, found) + found

    @property
    def is_complete(self) -> bool:
        """True if nothing can follow."""
        return self._library_form.is_stopped() and not self.fault

    @property
    def fault(self) -> str:
        """Why this matcher cannot continue. Empty while it can."""
        error: str = self._library_form.get_error()
        reason = error.removesuffix(_NO_DETAILS)
        return "nothing fits it" if reason in _DEAD_ENDS else reason

    def mask(self) -> tuple[bytearray, bool]:
        """Return the mask of the tokens that may follow, and whether the output may end here.

        The mask is zero if nothing may follow or the matcher is unusable. Takes about ten microseconds, for a few
        grammars up to a millisecond.
        """
        # perf: sequential in one thread. Copies share the library's cache of their grammar behind a lock, and
        # contending threads take longer together than one thread takes for all copies.
        tokens = self._tokens
        mask = bytearray(self._mask_of(self._library_form))
        end_byte, end_bit = divmod(tokens.vocab_size, 8)
        may_end = bool(mask[end_byte] >> end_bit & 1)
        mask[end_byte] &= ~(1 << end_bit)
        del mask[tokens.num_slot_mask_bytes :]
        return mask, may_end

    def _mask_of(self, form: LLMatcher) -> Any:
        """Return the library's mask of a state: a ctypes array that the next call overwrites."""
        mask = self._tokens.mask
        form.unsafe_compute_mask_ptr(ctypes.addressof(mask), ctypes.sizeof(mask))
        return mask


def source_of(spec: GrammarSpec) -> str:
    """Return a grammar in the library's notation.

    Raises:
        GrammarFault: a regular expression ends within an escape, which the translation would drop.
    """
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return f"{HEADER}start: %json {spec.text}"
        case GrammarKind.REGEX:
            if (len(spec.text) - len(spec.text.rstrip("\\"))) % 2:
                raise GrammarFault("the regular expression ends with a backslash that escapes nothing")
            return f"{HEADER}start: /{regex_to_lark(spec.text)}/"
        case GrammarKind.LARK:
            # At the end, so that line numbers in errors refer to the author's text.
            return f"{spec.text}\n{HEADER}"
        case GrammarKind.FREE:
            raise GrammarFault("there is no grammar")


_NO_DETAILS = "\n<non-verbose/>"
_DEAD_ENDS = ("NoExtension", "NoExtensionBias")
_EXCERPT = re.compile(r"\n +\d+ \| .*", re.DOTALL)
_SCHEMA_ERROR = re.compile(r".*?failed to compile JSON schema: ", re.DOTALL)
_UNENFORCED = re.compile(r"Unimplemented keys: \[(.*)\]")
_CARETS = re.compile(r"\n *\^+ *(?=\n)")


def _explained(error: str) -> str:
    """Return the library's error as one line, in the caller's terms and without the excerpt of the source."""
    error = _SCHEMA_ERROR.sub("", _EXCERPT.sub("", error))
    error = _UNENFORCED.sub(r"the schema has keywords that cannot be enforced: \1", error)
    return " ".join(_CARETS.sub("", error).split())
