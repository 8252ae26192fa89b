"""`open_media`: creates the prompt maker of a model that reads media; `make_prompt` uses it."""

from collections.abc import Callable
from typing import Any

from octavo.frontend.audio.prompts import AudioPrompts
from octavo.frontend.generation.prompt import parts_of
from octavo.frontend.media.image_prompts import ImagePrompts
from octavo.frontend.media.parts import MediaOptions
from octavo.frontend.media.prompts import Encode, MediaPrompt, MediaPrompts, PromptMaker
from octavo.frontend.media.sources import FIELD, KWARGS, UUIDS, sources_of
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import InvalidRequestError


def open_media(config: ResolvedConfig, encode: Encode, on_query: Callable[[bool], None]) -> PromptMaker:
    """Return the prompt maker that fits the model: for rows of media, for attended audio, or for a single image.

    Args:
        config: the configuration of an engine whose model reads media.
        encode: tokenizes a text; see `AsyncClient.tokenize`.
        on_query: see `MediaProcessor`.
    """
    assert config.media is not None, "a model that reads media"
    if config.media.attended_rows:
        return AudioPrompts(config, encode)
    if config.media.vector_width:
        return ImagePrompts(config, encode, on_query)
    return MediaPrompts(config, encode, on_query)


def has_media(prompt: object) -> bool:
    """Return whether a caller's prompt has media."""
    return isinstance(prompt, dict) and bool(prompt.get(FIELD) or prompt.get(UUIDS))


async def make_prompt(
    maker: PromptMaker | None, prompt: dict[str, Any], vocab_size: int, cache_salt: str | None = None
) -> tuple[str | None, MediaPrompt]:
    """Return the text and the tokenized form of a prompt with media. The text wins if a prompt has text and tokens.

    Args:
        maker: the prompt maker of the model; None: the model reads only text.
        prompt: the prompt of the caller.
        vocab_size: the vocabulary size of the model.
        cache_salt: the `cache_salt` of the request.

    Raises:
        InvalidRequestError: the model reads only text, or an item cannot be used.
        OverloadedError: live requests already use all memory allowed for media.
    """
    if maker is None:
        raise InvalidRequestError(f"the model of this engine reads text only: leave {FIELD} out", FIELD)
    sources = sources_of(prompt.get(FIELD) or {}, prompt.get(UUIDS), maker.kinds)
    options = MediaOptions(prompt.get(KWARGS) or {}, cache_salt)
    text = prompt.get("prompt")
    if isinstance(text, str):
        adds = prompt.get("add_special_tokens", True)
        return text, await maker.of_text(text, sources, adds_special_tokens=adds, options=options)
    text, token_ids = parts_of(prompt, vocab_size)
    return text, await maker.of_tokens(token_ids or (), sources, options)
