"""Turns the engine's logprobs into the public ones."""

from octavo.frontend.outputs import Logprob, PositionLogprobs
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.events import TokenLogprobs


def position_logprobs(entry: TokenLogprobs, tokenizer: Tokenizer, *, is_ranked: bool = True) -> PositionLogprobs:
    """Return the logprobs at one position: the token itself, then the alternatives in the engine's order.

    Args:
        entry: the entry of the position.
        tokenizer: the tokenizer of the model.
        is_ranked: whether the alternatives are the most likely tokens; otherwise the caller named them.
    """
    result: PositionLogprobs = {}
    for place, (token_id, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
        if token_id not in result:
            rank = entry.rank if place == 0 else place if is_ranked else None
            text = None if tokenizer.is_absent else tokenizer.token_string(token_id)
            result[token_id] = Logprob(logprob, rank, text)
    return result
