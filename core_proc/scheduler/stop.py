"""Decides when a sequence ends. Stop strings are matched by the frontend, which handles text."""

from dataclasses import dataclass

from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.repetition import ends_in_repetition
from octavo.protocol.events import FinishReason
from octavo.protocol.ids import TokenId


@dataclass(frozen=True)
class FinishCause:
    """Why a sequence ended."""

    reason: FinishReason
    stop_token_id: TokenId | None = None


def find_stop(request: Request) -> FinishCause | None:
    """Return why the request ends after its last known output. Return None if it continues."""
    if request.num_known_outputs == 0:
        return None
    sampling, token = request.sampling, request.token_ids[-1]
    # The sampler masks these tokens below min_tokens, but a resumed output may contain one.
    if token in request.stop_tokens and request.num_known_outputs > sampling.min_tokens:
        if token in sampling.eos_token_ids:
            return FinishCause(FinishReason.STOP)
        if token in sampling.stop_token_ids:
            return FinishCause(FinishReason.STOP, token)
    if len(request.token_ids) >= request.max_num_tokens:
        return FinishCause(FinishReason.LENGTH)
    if (
        sampling.repetition is not None
        and request.num_known_outputs >= sampling.min_tokens
        and ends_in_repetition(request.token_ids, request.num_known_outputs, sampling.repetition)
    ):
        return FinishCause(FinishReason.REPETITION)
    return None
