"""llguidance, as the core uses it: a vocabulary, compiled grammars, and where an output stands in one.

Knows no requests and no time limits. Importing this takes a noticeable part of a second, so nothing does before the
first request with a grammar.
"""

import ctypes
import re
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from octavo.protocol.structured import GrammarKind, GrammarSpec

HEADER = '%llguidance {"no_forcing": true}\n'
"""Tokens are ruled out only if no valid output goes on with them. The library would otherwise force its own choice of
tokens wherever the grammar leaves no choice of text; which tokens make the text is for the model to say."""


class GrammarFault(Exception):
    """What is wrong with a grammar, for its author."""


class GrammarTokens:
    """The bytes of all tokens, in the form that grammars are compiled for.

    Args:
        tokens: the bytes of each token id; none for ids that are not used.
        special_token_ids: tokens that are no text.
    """

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[int]) -> None:
        # These names are what the library looks for. Without an end token of the model it makes one of its own,
        # numbered after the last: its bit in a mask says that the output may end here.
        self.is_tokenizer_wrapper = True
        self.tokens = list(tokens)
        self.special_token_ids = list(special_token_ids)
        self.eos_token_id = self.bos_token_id = None
        self.library_form = LLTokenizer(self)
        self.vocab_size = len(tokens)
        num_words = self.library_form.vocab_size // 32 + (self.library_form.vocab_size % 32 > 0)
        self.mask = (ctypes.c_uint32 * num_words)()
        """Where the library writes a mask."""
        self.num_slot_mask_bytes = 4 * -(-self.vocab_size // 32)

    @classmethod
    def of_bytes(cls) -> "GrammarTokens":
        """Return a vocabulary of the 256 bytes, to try grammars with."""
        return cls([bytes([byte]) for byte in range(256)], [])

    def __call__(self, text: str) -> list[int]:
        """Return tokens of a text, which need not be those that the model's tokenizer would choose.

        The library asks only for grammars whose author has it force tokens after all.
        """
        token_ids: list[int] = self.library_form.greedy_tokenize(text)
        return token_ids


class Matcher:
    """How far an output has come in a grammar."""

    def __init__(self, tokens: GrammarTokens, library_form: LLMatcher) -> None:
        self._tokens = tokens
        self._library_form = library_form

    @classmethod
    def compile(cls, tokens: GrammarTokens, source: str) -> "Matcher":
        """Return the beginning of an output in a grammar.

        Blocks until: done, with other threads running meanwhile; no limit but the library's own keeps it short.

        Raises:
            GrammarFault: the source is not a grammar, or too large a one.
        """
        limits = LLParserLimits(verbose_errors=False)
        matcher = cls(tokens, LLMatcher(tokens.library_form, source, log_level=0, limits=limits))
        if fault := matcher.fault:
            raise GrammarFault(_explained(fault))
        return matcher

    def copy(self) -> "Matcher":
        """Return another output that stands at the same point."""
        return Matcher(self._tokens, self._library_form.deep_copy())

    def take(self, token_id: int) -> bool:
        """Go on by one token; False where the grammar has no place for it, and then this matcher is spoilt."""
        has_taken: bool = self._library_form.consume_token(token_id)
        return has_taken

    @property
    def is_complete(self) -> bool:
        """True when nothing can follow."""
        return self._library_form.is_stopped() and not self.fault

    @property
    def fault(self) -> str:
        """Why this matcher cannot go on; "" while it can."""
        error: str = self._library_form.get_error()
        reason = error.removesuffix(_NO_DETAILS)
        return "nothing fits it" if reason in _DEAD_ENDS else reason

    def mask(self) -> tuple[bytearray, bool]:
        """Return the mask of the tokens that may follow, and whether the output may end here.

        The mask is empty where nothing may follow, and of a spoilt matcher. Takes some ten microseconds, for a few
        grammars as long as a millisecond.
        """
        # perf: one after another in one thread. Copies share what the library has learnt of their grammar behind a
        # lock, and threads that wait for it take longer together than one takes for all.
        tokens = self._tokens
        self._library_form.unsafe_compute_mask_ptr(ctypes.addressof(tokens.mask), ctypes.sizeof(tokens.mask))
        mask = bytearray(tokens.mask)
        end_byte, end_bit = divmod(tokens.vocab_size, 8)
        may_end = bool(mask[end_byte] >> end_bit & 1)
        mask[end_byte] &= ~(1 << end_bit)
        del mask[tokens.num_slot_mask_bytes :]
        return mask, may_end


def source_of(spec: GrammarSpec) -> str:
    """Return a grammar in the library's notation.

    Raises:
        GrammarFault: a regular expression ends within an escape, which the translation would leave out.
    """
    match spec.kind:
        case GrammarKind.JSON_SCHEMA:
            return f"{HEADER}start: %json {spec.text}"
        case GrammarKind.REGEX:
            if (len(spec.text) - len(spec.text.rstrip("\\"))) % 2:
                raise GrammarFault("the regular expression ends with a backslash that escapes nothing")
            return f"{HEADER}start: /{regex_to_lark(spec.text)}/"
        case GrammarKind.LARK:
            # At the end, so that the lines that errors name are the author's.
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
    """Return the library's error in one line, without the excerpt of the source, and in the caller's terms."""
    error = _SCHEMA_ERROR.sub("", _EXCERPT.sub("", error))
    error = _UNENFORCED.sub(r"the schema has keywords that cannot be enforced: \1", error)
    return " ".join(_CARETS.sub("", error).split())
