"""Checks whether texts are outputs of a grammar, over a vocabulary of bytes."""

from functools import cache

from octavo.core_proc.grammar.matcher import GrammarTokens, Matcher, source_of
from octavo.frontend.generation.grammar import grammar_spec
from octavo.protocol.structured import StructuredOutputsParams


@cache
def tokens() -> GrammarTokens:
    return GrammarTokens.of_bytes()


def compiled(form: StructuredOutputsParams) -> Matcher:
    form.verify()
    return Matcher.compile(tokens(), source_of(grammar_spec(form, {})))


def fits(matcher: Matcher, text: str) -> bool:
    """Return whether the text is a complete output of the grammar."""
    matcher = matcher.copy()
    if not all(matcher.accept(byte) for byte in text.encode()):
        return False
    _, may_end = matcher.mask()
    return may_end or matcher.is_complete
