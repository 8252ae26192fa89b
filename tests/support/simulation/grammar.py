"""Grammars of the simulation: small languages of tokens, and a compiler that takes virtual time instead of threads.

They replace `core_proc/grammar/{compiler,matcher}.py`; everything above those is real.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from octavo.core_proc.grammar.compiler import CompileFailure, GrammarKey, grammar_key
from octavo.protocol.events import FailureKind
from octavo.protocol.requests import ModelVocabulary
from octavo.protocol.structured import GrammarKind, GrammarSpec

WRONG = "wrong"
"""The text of a grammar that does not compile."""


@dataclass(frozen=True)
class Language:
    """Outputs of `low` to `high` tokens, the one at position i congruent to i + shift modulo the modulus."""

    modulus: int
    shift: int
    low: int
    high: int

    @property
    def text(self) -> str:
        """The grammar's source."""
        return f"{self.modulus} {self.shift} {self.low} {self.high}"

    @classmethod
    def parse(cls, text: str) -> "Language":
        """Read a source."""
        return cls(*map(int, text.split()))

    def allows(self, position: int, token_id: int) -> bool:
        """True if the token is allowed at this position of the output."""
        return position < self.high and token_id % self.modulus == (position + self.shift) % self.modulus


@dataclass
class SimulatedMatcher:
    """The state of one output; replaces `Matcher`."""

    language: Language
    vocab_size: int
    position: int = 0
    fault: str = ""

    def copy(self) -> "SimulatedMatcher":
        """Return a copy that advances independently."""
        return replace(self)

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False if the language does not allow it."""
        if not self.language.allows(self.position, token_id):
            return False
        self.position += 1
        return True

    def continuation(self, num_tokens: int) -> list[int]:
        """Return the lowest tokens that may follow, which the model often draws from a small vocabulary."""
        draft = []
        for position in range(self.position, min(self.position + num_tokens, self.language.high - 1)):
            fitting = [token_id for token_id in range(self.vocab_size) if self.language.allows(position, token_id)]
            draft += fitting[:1]
        return draft

    @property
    def is_complete(self) -> bool:
        """True when nothing can follow."""
        return self.position == self.language.high

    def mask(self) -> tuple[bytearray, bool]:
        """Return the tokens that may follow, and whether the output may end here."""
        mask = bytearray(4 * -(-self.vocab_size // 32))
        for token_id in range(self.vocab_size):
            if self.language.allows(self.position, token_id):
                mask[token_id >> 3] |= 1 << (token_id & 7)
        return mask, self.position >= self.language.low


class SimulatedCompiler:
    """Compiles each grammar once, some virtual time after `start`.

    Args:
        later: calls a function after some time.
        on_done: called when `take_done` has something.
    """

    wake_fd = -1

    def __init__(self, later: Callable[[Callable[[], None]], None], on_done: Callable[[], None]) -> None:
        self.vocabulary: ModelVocabulary | None = None
        self._later = later
        self._on_done = on_done
        self._pending: set[GrammarKey] = set()
        self._kept: dict[GrammarKey, SimulatedMatcher] = {}
        self._done: list[tuple[GrammarKey, SimulatedMatcher | CompileFailure]] = []

    def set_vocabulary(self, vocabulary: ModelVocabulary) -> None:
        """Take the vocabulary; the first one stays."""
        self.vocabulary = self.vocabulary or vocabulary

    def find(self, spec: GrammarSpec) -> SimulatedMatcher | None:
        """Return a new matcher of a grammar that is compiled already."""
        matcher = self._kept.get(grammar_key(spec))
        return matcher and matcher.copy()

    def start(self, spec: GrammarSpec, client: bytes) -> GrammarKey:
        """Have a grammar compiled, and return its name in `take_done`."""
        key = grammar_key(spec)
        if key not in self._pending:
            self._pending.add(key)
            self._later(lambda: self._finish(key))
        return key

    def drop(self, key: GrammarKey) -> None:
        """Note that nobody waits for a grammar any more."""
        self._pending.discard(key)

    def take_done(self) -> list[tuple[GrammarKey, SimulatedMatcher | CompileFailure]]:
        """Return the results and failures since the last call."""
        done, self._done = self._done, []
        for key, result in done:
            if isinstance(result, SimulatedMatcher):
                self._kept[key] = result
        return done

    def _finish(self, key: GrammarKey) -> None:
        if key not in self._pending:
            return
        self._pending.discard(key)
        assert self.vocabulary is not None
        _, text, _ = key
        if text == WRONG:
            result: SimulatedMatcher | CompileFailure = CompileFailure(FailureKind.INVALID, "the grammar is wrong")
        else:
            result = SimulatedMatcher(Language.parse(text), len(self.vocabulary.tokens))
        self._done.append((key, result))
        self._on_done()


def spec_of(language: Language | None, start_after: int | None) -> GrammarSpec:
    """Return what a frontend submits: a language (None: one that does not compile), after a marker token."""
    text = WRONG if language is None else language.text
    return GrammarSpec(GrammarKind.LARK, text, start_after=b"" if start_after is None else bytes([start_after]))


def vocabulary(vocab_size: int) -> ModelVocabulary:
    """Return the vocabulary: each token is one byte."""
    return ModelVocabulary([bytes([token_id]) for token_id in range(vocab_size)], [])
