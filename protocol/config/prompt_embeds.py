"""Resolves whether an engine accepts prompt embeddings, and checks that the rows of a step fit into a message."""

from octavo.protocol.buffers import MAX_BUFFERS_BYTES
from octavo.protocol.config.engine import EngineConfig
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def embedding_bytes(facts: ModelFacts, dtype: str) -> int:
    """Return the bytes of one row of prompt embeddings, which has the data type of the model."""
    return facts.embedding_width * _DTYPE_BYTES[dtype]


def takes_prompt_embeds(config: EngineConfig, facts: ModelFacts, dtype: str, budget: int) -> bool:
    """Return whether the engine accepts prompt embeddings.

    Args:
        config: the user's settings.
        facts: facts of the model.
        dtype: data type of the model.
        budget: most tokens of a step.

    Raises:
        ConfigError: the user has enabled them, but the engine cannot accept them.
    """
    if config.model.enable_prompt_embeds and facts.media is not None and facts.media.deeper_rows:
        raise ConfigError(
            f"--enable-prompt-embeds: {facts.media.architecture} reads rows of images in several layers",
            hint="leave --enable-prompt-embeds out",
        )
    if not config.model.enable_prompt_embeds:
        return False
    if not facts.embedding_width:
        raise ConfigError(
            "--enable-prompt-embeds: config.json has none of word_embed_proj_dim, hidden_size, n_embd and d_model, so "
            "the width of the embeddings is unknown",
            hint="leave --enable-prompt-embeds out",
        )
    most = MAX_BUFFERS_BYTES // embedding_bytes(facts, dtype)
    if budget > most:
        raise ConfigError(
            f"--enable-prompt-embeds: the embeddings of a step of {budget} tokens do not fit into one message",
            hint=f"use --max-num-batched-tokens {most} or less",
        )
    return True
