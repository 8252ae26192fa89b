"""Counts the reasoning tokens of an output."""

from collections.abc import Sequence

from octavo.frontend.reasoning.parser import ReasoningParser, ReasoningState, TagTokenizer


def num_reasoning_tokens(
    parser: ReasoningParser, state: ReasoningState, token_ids: Sequence[int], tokenizer: TagTokenizer
) -> int:
    """Return how many of the generated tokens are reasoning, including its closing mark."""
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    bounds = parser.bounds(text, state)
    if bounds is None:
        return 0
    if bounds.stop is None:
        return len(token_ids)
    end = next((end for end in parser.ends if text.startswith(end, bounds.stop)), "")
    tag = tokenizer.token_id(end) if end else None
    if tag is not None and tag in token_ids:  # perf: avoids decoding the rest of a long output
        return token_ids.index(tag) + 1
    return num_tokens_of(text[: bounds.stop + len(end)], token_ids, tokenizer)


def num_tokens_of(prefix: str, token_ids: Sequence[int], tokenizer: TagTokenizer) -> int:
    """Return the smallest number of tokens whose text starts with `prefix`."""
    low, high = 0, len(token_ids)  # `high` tokens are always enough
    while low < high:
        middle = (low + high) // 2
        if tokenizer.decode(token_ids[:middle], skip_special_tokens=False).startswith(prefix):
            high = middle
        else:
            low = middle + 1
    return high
