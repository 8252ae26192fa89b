"""`open_media`: what makes the prompts of a model that reads media."""

from collections.abc import Callable

from octavo.frontend.audio.prompts import AudioPrompts
from octavo.frontend.media.prompts import Encode, MediaPrompts, PromptMaker
from octavo.protocol.config import ResolvedConfig


def open_media(config: ResolvedConfig, encode: Encode, on_query: Callable[[bool], None]) -> PromptMaker:
    """Return what makes prompts with rows of media, or with sounds that are attended to.

    Args:
        config: of an engine whose model reads media.
        encode: tokenizes: see `AsyncClient.tokenize`.
        on_query: see `MediaProcessor`.
    """
    assert config.media is not None, "a model that reads media"
    if config.media.attended_rows:
        return AudioPrompts(config, encode)
    return MediaPrompts(config, encode, on_query)
