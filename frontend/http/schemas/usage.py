"""Token counts of a request."""

from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct):
    """Where the prompt tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """What the generated tokens were used for."""

    reasoning_tokens: int


class Usage(Struct):
    """Token usage over all choices. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Only if a reasoning parser separates the reasoning."""
