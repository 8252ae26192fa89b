"""`/inference/v1/generate`: vLLM's route that takes and returns token ids; request and response."""

from typing import Annotated, Any

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from octavo.frontend.http.schemas.chat import ChatLogprobs
from octavo.frontend.http.schemas.completions import PromptLogprobs
from octavo.frontend.http.schemas.sampling import Priority, StreamOptions
from octavo.frontend.http.schemas.usage import Usage
from octavo.frontend.outputs import WeightRange


class GenerateRequest(Struct, kw_only=True):
    """Tokens to continue."""

    token_ids: Annotated[list[int], Meta(min_length=1)]
    sampling_params: Raw
    """An object with the fields of `SamplingParams`. Omitted fields have the defaults of that class, not the model's.
    Without `max_tokens` the response may fill the context."""
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    priority: Priority = 0
    kv_transfer_params: dict[str, Any] | None = None
    return_weight_versions: bool = False
    """Report which version of the weights drew which tokens, even if there is only one."""
    features: Any = None
    """Rejected: only conversations may contain media."""


class GenerateChoice(Struct, kw_only=True):
    """One continuation, or its new part in a stream."""

    index: int
    logprobs: ChatLogprobs | None = None
    """Logprobs; tokens have names of the form `token_id:ID`."""
    finish_reason: str | None = None
    token_ids: list[int]
    weight_versions: list[WeightRange] | UnsetType = UNSET
    """Which version of the weights drew which tokens, if there are several versions or they were requested."""


class GenerateResponse(Struct, kw_only=True):
    """The complete response, or one chunk of a stream."""

    request_id: str
    choices: list[GenerateChoice]
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_id_logprobs: str | UnsetType = UNSET
    """Logprobs of `prompt_logprob_token_ids`: base64 of a .npy file with float32 numbers in the same shape."""
    kv_transfer_params: dict[str, Any] | UnsetType | None = UNSET
    usage: Usage | UnsetType = UNSET
    """In streams: in the last chunk, or in every chunk, depending on `stream_options`."""
