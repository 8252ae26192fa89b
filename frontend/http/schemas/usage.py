"""How many tokens a request took."""

from msgspec import UNSET, Struct, UnsetType


class PromptTokensDetails(Struct):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """What the generated tokens were for."""

    reasoning_tokens: int


class Usage(Struct):
    """Counted over all choices; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """If a reasoning parser separates them."""
