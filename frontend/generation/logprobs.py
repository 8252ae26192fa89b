"""From the engine's logprobs to the public ones."""

from octavo.frontend.outputs import Logprob, PositionLogprobs
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.events import TokenLogprobs


def position_logprobs(entry: TokenLogprobs, tokenizer: Tokenizer) -> PositionLogprobs:
    """Return the logprobs at one position: the token itself, then the alternatives by rank."""
    result: PositionLogprobs = {}
    for place, (token_id, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
        if token_id not in result:
            rank = entry.rank if place == 0 else place
            text = None if tokenizer.is_absent else tokenizer.token_string(token_id)
            result[token_id] = Logprob(logprob, rank, text)
    return result
