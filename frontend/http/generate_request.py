"""Turns the body of `/inference/v1/generate` into that of `/v1/completions`, whose code serves both."""

from typing import Any

import msgspec

from octavo.frontend.http.body import decode
from octavo.frontend.http.errors import BodyError
from octavo.frontend.http.schemas.completions import CompletionRequest
from octavo.frontend.http.schemas.generate import GenerateRequest
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.params import SamplingParams

_OTHERS = ("prompt_logprob_token_ids", "prompt_logprob_start", "speech_rules")
"""Parameters that `/v1/completions` does not have at all."""

_NOT_FIELDS = ("max_tokens", "output_kind", "detokenize", "skip_reading_prefix_cache", "extra_args", *_OTHERS)
"""Parameters that `/v1/completions` does not have under this name."""

_FIELDS = [name for name in SamplingParams.__struct_fields__ if name not in _NOT_FIELDS]

ERROR_NAMES = {
    "prompt": "token_ids",
    "extra_args": "sampling_params.extra_args",
    "max_tokens": "sampling_params.max_tokens",
    **{name: f"sampling_params.{name}" for name in (*_FIELDS, *_OTHERS)},
}
"""Field names for errors, by the field names of `/v1/completions`."""


class _MaxTokensOnly(msgspec.Struct):
    max_tokens: int | None = None


def completion_body(request: GenerateRequest, max_model_len: int) -> tuple[CompletionRequest, dict[str, Any]]:
    """Return the equivalent body for `/v1/completions`, and the parameters that have no field there.

    Args:
        request: the body.
        max_model_len: the maximum context length of the engine.

    Raises:
        InvalidRequestError: a parameter is invalid; `param` is its path.
    """
    if request.features is not None:
        raise InvalidRequestError(
            "features is not supported: send images in chat completions, which read them", "features"
        )
    params = _sampling_params(request.sampling_params)
    if request.stream and params.prompt_logprob_token_ids is not None:
        name = ERROR_NAMES["prompt_logprob_token_ids"]
        raise InvalidRequestError(f"{name} is not available with stream=true", name)
    max_tokens = msgspec.json.decode(request.sampling_params, type=_MaxTokensOnly).max_tokens
    body = CompletionRequest(
        prompt=list(request.token_ids),
        model=request.model,
        stream=request.stream,
        stream_options=request.stream_options,
        cache_salt=request.cache_salt,
        priority=request.priority,
        kv_transfer_params=request.kv_transfer_params,
        return_weight_versions=request.return_weight_versions,
        vllm_xargs=params.extra_args,
        max_tokens=max(1, max_model_len - len(request.token_ids)) if max_tokens is None else max_tokens,
        **{name: getattr(params, name) for name in _FIELDS},
    )
    return body, {name: value for name in _OTHERS if (value := getattr(params, name)) is not None}


def _sampling_params(raw: msgspec.Raw) -> SamplingParams:
    try:
        return decode(bytes(raw), SamplingParams)
    except InvalidRequestError as error:
        if error.param is None:
            raise BodyError(f"sampling_params: {error.message}", "sampling_params") from None
        path = f"sampling_params.{error.param}"
        raise type(error)(error.message.replace(error.param, path, 1), path) from None
