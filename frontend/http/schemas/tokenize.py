"""`/tokenize` and `/detokenize`: requests and responses."""

from typing import Any

from msgspec import Struct

from octavo.frontend.http.schemas.chat import ToolDefinition


class TokenizeRequest(Struct, kw_only=True):
    """Either a prompt or messages to tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for messages."""
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[ToolDefinition] | None = None


class TokenizeResponse(Struct, kw_only=True):
    """The tokens of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfo(Struct, kw_only=True):
    """The tokenizer's settings (`tokenizer_config.json`). The fields below are always present."""

    tokenizer_class: str
    chat_template: str | None
    """Chat template of this server; null if there is none."""


class DetokenizeRequest(Struct, kw_only=True):
    """Tokens of a complete text."""

    tokens: list[int]
    model: str | None = None


class DetokenizeResponse(Struct):
    """The text of the tokens, including special tokens."""

    prompt: str
