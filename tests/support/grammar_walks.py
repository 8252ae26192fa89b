"""Random outputs of a grammar, drawn uniformly from its masks."""

import random
from collections.abc import Iterator

from octavo.core_proc.grammar.matcher import GrammarTokens, Matcher, source_of
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.structured import GrammarSpec


def tokens_of(tokenizer: Tokenizer) -> GrammarTokens:
    """Return a tokenizer's vocabulary, with one unused id at its end as models have them."""
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size + 1)]
    return GrammarTokens(tokens, sorted(tokenizer.special_token_ids))


def allowed(mask: bytearray) -> list[int]:
    """Return the tokens of a mask."""
    bits = int.from_bytes(mask, "little")
    return [token_id for token_id in range(8 * len(mask)) if bits >> token_id & 1]


def walk(tokens: GrammarTokens, spec: GrammarSpec, rng: random.Random, max_tokens: int = 400) -> bytes | None:
    """Return one complete output of the grammar. `None` if there was none within `max_tokens`."""
    matcher, output = Matcher.compile(tokens, source_of(spec)), b""
    for _ in range(max_tokens):
        mask, may_end = matcher.mask()
        candidates = allowed(mask)
        if not candidates or (may_end and rng.random() < 0.3):
            assert may_end, "nothing may follow, and yet it is not the end"
            return output
        # Otherwise most strings would not end.
        ends = [token_id for token_id in candidates if any(byte in b'"}]' for byte in tokens.tokens[token_id])]
        token_id = rng.choice(ends if ends and rng.random() < 0.5 else candidates)
        assert matcher.accept(token_id), "the mask allowed what the grammar does not"
        output += tokens.tokens[token_id]
        if matcher.is_complete:
            return output
    return None


def walks(tokens: GrammarTokens, spec: GrammarSpec, seed: int, count: int) -> Iterator[bytes]:
    """Yield the complete outputs of several walks."""
    rng = random.Random(seed)
    for _ in range(count):
        if (output := walk(tokens, spec, rng)) is not None:
            yield output
