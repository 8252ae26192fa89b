"""What a frontend is told of its requests: their tokens, and how they finished. Decides nothing and sends nothing."""

from octavo.core_proc.gathered import Gathered
from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.stop import Stop
from octavo.protocol.errors import ProtocolError
from octavo.protocol.events import Finished, RequestEvent, TokenLogprobs, Tokens
from octavo.protocol.ids import TokenId
from octavo.protocol.stats import RequestTimings

ClientEvent = tuple[bytes, RequestEvent]
"""A frontend's identity and what to tell it."""


def tokens_event(
    request: Request, token_ids: list[TokenId], logprobs: list[TokenLogprobs] | None, times: list[float]
) -> ClientEvent:
    """Return the news of a request's next tokens, and with the first of them of its prompt's logprobs.

    Args:
        request: whose tokens they are.
        token_ids: that its frontend does not know yet.
        logprobs: one entry a token; None: they were not asked for.
        times: when each token was known, on the core's clock; empty: now.

    Raises:
        ProtocolError: the workers have not given the logprobs of the whole prompt.
    """
    tokens = Tokens(
        request_id=request.request_id,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=_take_prompt_logprobs(request),
        num_cached_tokens=request.num_cached_tokens,
        times=times,
    )
    return (request.client, tokens)


def gathered_event(request: Request) -> ClientEvent:
    """Return the news of the tokens that were kept back, which are not kept any more."""
    gathered, request.gathered = request.gathered, Gathered()
    return tokens_event(request, gathered.token_ids, gathered.logprobs or None, gathered.times)


def finished_event(request: Request, stop: Stop, now: float) -> ClientEvent:
    """Return the news of a request's good end, at `now` on the core's clock."""
    finished = Finished(
        request_id=request.request_id,
        reason=stop.reason,
        stop_token_id=stop.stop_token_id,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        timings=RequestTimings(
            queued=request.time_queued,
            scheduled=request.time_scheduled,
            first_token=request.time_first_token,
            finished=now,
        ),
    )
    return (request.client, finished)


def _take_prompt_logprobs(request: Request) -> list[TokenLogprobs | None] | None:
    if request.sampling.prompt_logprobs is None or request.has_delivered_prompt_logprobs:
        return None
    if len(request.prompt_logprobs) != request.num_prompt_tokens:
        raise ProtocolError(
            f"request {request.request_id} has {request.num_prompt_tokens} prompt tokens "
            f"and logprobs of {len(request.prompt_logprobs)}"
        )
    request.has_delivered_prompt_logprobs = True
    logprobs, request.prompt_logprobs = request.prompt_logprobs, []
    return logprobs
