"""Request fields that chat and plain completions share. None: the request does not set the field."""

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from octavo.frontend.http.schemas.structured import StructuredFields
from octavo.protocol.repetition import RepetitionDetectionParams
from octavo.protocol.sampling_table import PARAMETERS


def _bounds(parameter: str) -> Meta:
    """Return a parameter's bounds for the OpenAPI description. `SamplingParams` enforces them."""
    return Meta(extra_json_schema=PARAMETERS[parameter].json_bounds)


Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

Priority: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(Struct, kw_only=True):
    """What a stream reports in addition to text."""

    include_usage: bool | None = None
    """Whether a chunk at the end has the usage of the whole request and no choices."""
    continuous_usage_stats: bool | None = None
    """Whether every chunk has the usage so far; requires `include_usage`."""


class SamplingFields(StructuredFields, kw_only=True):
    """Fields of OpenAI's API and of vLLM's extensions, with their names and meanings."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int | None, _bounds("n")] = None
    temperature: Annotated[float | None, _bounds("temperature")] = None
    top_p: Annotated[float | None, _bounds("top_p")] = None
    top_k: Annotated[int | None, _bounds("top_k")] = None
    min_p: Annotated[float | None, _bounds("min_p")] = None
    frequency_penalty: Annotated[float | None, _bounds("frequency_penalty")] = None
    presence_penalty: Annotated[float | None, _bounds("presence_penalty")] = None
    repetition_penalty: Annotated[float | None, _bounds("repetition_penalty")] = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[int, _bounds("min_tokens")] = 0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    """Ends a repetitive response with the `finish_reason` repetition."""
    use_beam_search: bool = False
    """Return the `n` most likely sequences found by a beam search. Its width is `n`, or `best_of` if that is set."""
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    stream_interval: Annotated[int | None, _bounds("stream_interval")] = None
    speculation: Literal["off"] | int | None = None
    """Maximum number of draft tokens per step, for an engine with `--speculative-config`; "off" disables drafting."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprob_token_ids: list[int] | None = None
    """Tokens whose logprobs are reported at each position after the chosen token's, instead of the most likely ones."""
    prompt_logprobs: Annotated[int | None, _bounds("prompt_logprobs")] = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """Keep only this many of the prompt's last tokens; -1: the engine's maximum."""
    truncation_side: Literal["left", "right"] | None = None
    vllm_xargs: dict[str, Any] | None = None
    """Arguments for the engine's logits processors: `SamplingParams.extra_args`."""
    kv_transfer_params: dict[str, Any] | None = None
    """KV blocks that the request leaves for another engine, or fetches from one: see docs/disaggregation.md."""
    priority: Priority = 0
    request_id: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    return_token_ids: bool | None = None
    return_weight_versions: bool = False
    """Report which version of the weights drew which tokens, even if there is only one."""
    return_tokens_as_token_ids: bool | None = None
    return_receipt: bool = False
    """Return a `receipt`, which `octavo verify` compares with a recomputation of the same request."""
    echo: bool = False
    user: str | None = None
