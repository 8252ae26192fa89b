"""How many tokens a request took."""

from msgspec import Struct


class PromptTokensDetails(Struct):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class Usage(Struct):
    """Counted over all choices; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
