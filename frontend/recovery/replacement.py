"""Whether another engine can take over the requests of this one. Starts none."""

from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import ConfigError


def require_same_tokens(
    old: ResolvedConfig, old_tokenizer: Tokenizer, new: ResolvedConfig, new_tokenizer: Tokenizer
) -> None:
    """Check that token ids have the same bytes in both engines. Slow: compares the whole vocabulary.

    Raises:
        ConfigError: they differ.
    """
    have_same_ends = (old.model.vocab_size, old.model.eos_token_ids) == (new.model.vocab_size, new.model.eos_token_ids)
    if not have_same_ends or any(
        old_tokenizer.token_bytes(token_id) != new_tokenizer.token_bytes(token_id)
        for token_id in range(new.model.vocab_size)
    ):
        message = f"{new.model.model_path} has other tokens than {old.model.model_path}"
        raise ConfigError(message, phase="configuration", hint="start another engine instead")
