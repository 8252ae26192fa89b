"""Builds the events about requests: their tokens, and how they finished. Decides nothing and sends nothing."""

from collections import defaultdict
from collections.abc import Callable, Iterable

from octavo.core_proc.pending_output import PendingOutput
from octavo.core_proc.queued_request import LiveRequest
from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.delta import StepRecord
from octavo.core_proc.scheduler.stop import FinishCause
from octavo.protocol.errors import ProtocolError
from octavo.protocol.events import Finished, PooledOutput, StepEvent, StreamedTokens, TokenLogprobs, Tokens
from octavo.protocol.ids import TokenId
from octavo.protocol.stats import RequestTimings
from octavo.protocol.steps import StepResult

ClientEvent = tuple[bytes, StepEvent]
"""The identity of a frontend and an event for it."""


def collect_prompt_logprobs(record: StepRecord, result: StepResult) -> None:
    """Collect the logprobs of prompts until they are sent with the first token."""
    if not result.prompt_logprobs:
        return
    by_slot = {scheduled.slot: request for request, scheduled in record.chunks}
    for slot, logprobs in result.prompt_logprobs:
        request = by_slot[slot]
        if not request.has_delivered_prompt_logprobs:
            request.prompt_logprobs += logprobs


def is_plain_stream(request: Request) -> bool:
    """Return whether each further token is sent at once, without logprobs or checks of the output."""
    sampling = request.sampling
    return (
        request.time_first_token > 0.0
        and request.stream_interval == 1
        and sampling.logprobs is None
        and sampling.repetition is None
        and (sampling.prompt_logprobs is None or request.has_delivered_prompt_logprobs)
    )


def streamed_events(requests: Iterable[Request]) -> list[ClientEvent]:
    """Return one event per frontend with the latest token of each of its plain streams."""
    by_client: defaultdict[bytes, list[Request]] = defaultdict(list)
    for request in requests:
        by_client[request.client].append(request)
    return [
        (
            client,
            StreamedTokens(
                [request.request_id for request in streams],
                [request.token_ids[-1] for request in streams],
                [request.num_cached_tokens for request in streams],
                streams[0].weight_version,
            ),
        )
        for client, streams in by_client.items()
    ]


def output_events(
    request: Request, token_ids: list[TokenId], logprobs: list[TokenLogprobs], clock: Callable[[], float]
) -> list[ClientEvent]:
    """Return the events for new tokens. The list is empty if the tokens wait for a later message (`stream_interval`).

    Args:
        request: the request that generated the tokens.
        token_ids: at least one.
        logprobs: one entry per token. Empty if not requested.
        clock: returns the time in seconds.
    """
    is_first = not request.time_first_token
    if is_first:
        request.time_first_token = clock()
    if request.stream_interval == 1:
        return [tokens_event(request, token_ids, logprobs or None, [])]
    pending_output = request.pending_output = request.pending_output or PendingOutput()
    pending_output.add(token_ids, logprobs, request.time_first_token if is_first else clock())
    if (is_first and not request.is_resumed) or len(pending_output.token_ids) >= request.stream_interval:
        return [pending_output_event(request)]
    return []


def tokens_event(
    request: Request, token_ids: list[TokenId], logprobs: list[TokenLogprobs] | None, times: list[float]
) -> ClientEvent:
    """Return the event for a request's next tokens. The first event carries the logprobs of the prompt.

    Args:
        request: the request that generated the tokens.
        token_ids: tokens that were not sent before.
        logprobs: one entry per token. None if not requested.
        times: when each token became known, on the core's clock. Empty if now.

    Raises:
        ProtocolError: the workers have not returned logprobs for the complete prompt.
    """
    tokens = Tokens(
        request_id=request.request_id,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=_take_prompt_logprobs(request),
        num_cached_tokens=request.num_cached_tokens,
        times=times,
        weight_version=request.weight_version,
    )
    return (request.client, tokens)


def pending_output_event(request: Request) -> ClientEvent:
    """Return the event for the tokens that were held back, and clear them."""
    pending_output, request.pending_output = request.pending_output, None
    assert pending_output is not None, "no tokens were kept back"
    return tokens_event(request, pending_output.token_ids, pending_output.logprobs or None, pending_output.times)


def finished_event(
    request: LiveRequest, cause: FinishCause, now: float, result: PooledOutput | None = None
) -> ClientEvent:
    """Return the event for a finished request. `now` is on the core's clock."""
    finished = Finished(
        request_id=request.request_id,
        reason=cause.reason,
        stop_token_id=cause.stop_token_id,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        timings=RequestTimings(
            queued=request.time_queued,
            scheduled=request.time_scheduled,
            first_token=request.time_first_token,
            finished=now,
        ),
        result=result,
        kv_transfer=None if request.kv_transfer is None or request.kv_transfer.leaves else request.kv_transfer,
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
