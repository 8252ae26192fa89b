"""When a sequence ends: after a token that is known, and before one that would be too many.

Stop strings are the frontend's: it knows text.
"""

from dataclasses import dataclass

from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.repetition import ends_in_repetition
from octavo.protocol.events import FinishReason
from octavo.protocol.ids import TokenId


@dataclass(frozen=True)
class Stop:
    """Why a sequence ended."""

    reason: FinishReason
    stop_token_id: TokenId | None = None


def find_stop(request: Request, max_model_len: int) -> Stop | None:
    """Return why the request ends with its last known output, None when it goes on."""
    if request.num_known_outputs == 0:
        return None
    sampling, token = request.sampling, request.token_ids[-1]
    # The sampler masks these tokens below min_tokens; a resumed output may hold one all the same.
    if request.num_known_outputs > sampling.min_tokens:
        if token in sampling.eos_token_ids:
            return Stop(FinishReason.STOP)
        if token in sampling.stop_token_ids:
            return Stop(FinishReason.STOP, token)
    if request.num_known_outputs >= sampling.max_tokens or len(request.token_ids) >= max_model_len:
        return Stop(FinishReason.LENGTH)
    if (
        sampling.repetition is not None
        and request.num_known_outputs >= sampling.min_tokens
        and ends_in_repetition(request.token_ids, request.num_known_outputs, sampling.repetition)
    ):
        return Stop(FinishReason.REPETITION)
    return None


def is_certain_to_end(request: Request, max_model_len: int) -> bool:
    """True when the tokens in flight, whatever they are, complete the request: it needs no further step."""
    num_tokens = request.num_tokens
    num_outputs = num_tokens - request.num_prompt_tokens
    return num_outputs >= request.sampling.max_tokens or num_tokens >= max_model_len
