"""Sums the token usage that the results of a batch report, for all APIs that its requests may call."""

from collections.abc import Iterable

import msgspec

from octavo.frontend.http.schemas.batches import BatchUsage, InputDetails, OutputDetails


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class _Usage(msgspec.Struct):
    """Usage of a response, with the field names of all APIs: chat, completions, embeddings, responses and messages."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_input_tokens: int | None = None
    """In the Messages API, `input_tokens` does not include these tokens."""
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Answered(msgspec.Struct):
    body: _Body | None = None


class _Line(msgspec.Struct):
    response: _Answered | None = None


_NONE = _Details()


def batch_usage(results: Iterable[bytes]) -> BatchUsage:
    """Return the total usage of the results in a file."""
    total = BatchUsage(input_tokens_details=InputDetails(), output_tokens_details=OutputDetails())
    decoder = msgspec.json.Decoder(_Line)
    for line in results:
        response = decoder.decode(line).response
        if response is None or response.body is None or (usage := response.body.usage) is None:
            continue
        cached = usage.cache_read_input_tokens or 0
        given, made = usage.prompt_tokens + usage.input_tokens + cached, usage.completion_tokens + usage.output_tokens
        total.input_tokens += given
        total.output_tokens += made
        total.total_tokens += given + made
        of_input = usage.prompt_tokens_details or usage.input_tokens_details or _NONE
        of_output = usage.completion_tokens_details or usage.output_tokens_details or _NONE
        total.input_tokens_details.cached_tokens += cached or of_input.cached_tokens
        total.output_tokens_details.reasoning_tokens += of_output.reasoning_tokens
    return total
