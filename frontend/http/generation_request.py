"""Turns the sampling fields of a request body into a `GenerationRequest`, for chat and plain completions alike."""

from typing import Any

from octavo.frontend.generation.request import BeamOptions, GenerationRequest, Truncation
from octavo.frontend.http.schemas.sampling import SamplingFields
from octavo.protocol.adapters import Adapter
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.kv_transfer import PARAMS, read_transfer_params
from octavo.protocol.params import OutputKind
from octavo.protocol.repetition import RepetitionDetectionParams
from octavo.protocol.sampling_table import ROWS

_SAMPLING_FIELDS = [row.name for row in ROWS if row.is_request_field]
"""Request fields that set the `SamplingParams` field of the same name."""

_ONLY_FOR_SAMPLING: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "stream_interval": (1,),
    "speculation": ("off", 0),
    "vllm_xargs": ({},),
    "kv_transfer_params": ({},),
    "repetition_detection": (RepetitionDetectionParams(),),
}
"""Fields that beam search does not support, with their neutral values; None is always neutral."""


def generation_request(
    body: SamplingFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    default_max_tokens: int | None = None,
    adapter: Adapter | None = None,
) -> GenerationRequest:
    """Return the generation that a body requests, without its structured output.

    Args:
        body: the body, already checked by `check_fields`.
        max_tokens: `None` if the body does not set it.
        logprobs: as in `SamplingParams`; ignored if the body names the tokens.
        default_max_tokens: as in `GenerationRequest`.
        adapter: the LoRA adapter that the body's model name selects.
    """
    overrides = {name: value for name in _SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    overrides["logprobs"] = None if body.logprob_token_ids else logprobs
    overrides["prompt_logprobs"] = body.prompt_logprobs
    overrides["extra_args"] = body.vllm_xargs
    if body.kv_transfer_params:
        read_transfer_params(body.kv_transfer_params)  # first, so that an error names this field and not `vllm_xargs`
        overrides["extra_args"] = {**(body.vllm_xargs or {}), PARAMS: body.kv_transfer_params}
    overrides["output_kind"] = OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY
    if body.use_beam_search:
        overrides["temperature"] = 1.0  # unused: beam search returns several sequences at any temperature
    return GenerationRequest(
        overrides=overrides,
        max_tokens=max_tokens,
        default_max_tokens=default_max_tokens,
        beam=_beam_options(body) if body.use_beam_search else None,
        truncation=(
            None
            if body.truncate_prompt_tokens is None
            else Truncation(body.truncate_prompt_tokens, keeps_start=body.truncation_side == "right")
        ),
        priority=body.priority,
        cache_salt=body.cache_salt,
        adapter=adapter,
    )


def check_fields(body: SamplingFields) -> None:
    """Reject fields that exclude each other, in streams and in beam searches.

    Raises:
        InvalidRequestError: two fields contradict each other; `param` names one of them.
    """
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options is only for requests with stream=true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequestError("prompt_logprobs is not available with stream=true", "prompt_logprobs")
    if body.stream and body.kv_transfer_params and body.kv_transfer_params.get("do_remote_decode"):
        raise InvalidRequestError(
            f"{PARAMS}: do_remote_decode is not available with stream=true: the whole answer says how to go on", PARAMS
        )
    if body.use_beam_search:
        _check_beam_search(body)
        return
    if body.length_penalty not in (None, 1.0):
        raise InvalidRequestError("length_penalty needs use_beam_search", "length_penalty")
    if body.early_stopping not in (None, False):
        raise InvalidRequestError("early_stopping needs use_beam_search", "early_stopping")


def _check_beam_search(body: SamplingFields) -> None:
    if body.stream:
        raise InvalidRequestError("a beam search cannot be streamed: the best beam is known at the end", "stream")
    for name, neutral in _ONLY_FOR_SAMPLING.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise InvalidRequestError(f"{name} has no meaning for a beam search: leave it out", name)


def _beam_options(body: SamplingFields) -> BeamOptions:
    return BeamOptions(
        temperature=body.temperature or 0.0,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=body.early_stopping or False,
    )
