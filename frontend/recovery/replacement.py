"""Checks whether another engine can take over the requests of this one. Starts no engines."""

from collections.abc import Mapping

from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import ConfigError, ConflictError


def require_same_tokens(
    old: ResolvedConfig, old_tokenizer: Tokenizer, new: ResolvedConfig, new_tokenizer: Tokenizer
) -> None:
    """Check that token ids stand for the same bytes in both engines. Slow: compares the complete vocabulary.

    Raises:
        ConfigError: the vocabularies differ.
    """
    have_same_ends = (old.model.vocab_size, old.model.eos_token_ids) == (new.model.vocab_size, new.model.eos_token_ids)
    if not have_same_ends or any(
        old_tokenizer.token_bytes(token_id) != new_tokenizer.token_bytes(token_id)
        for token_id in range(new.model.vocab_size)
    ):
        message = f"{new.model.model_path} has other tokens than {old.model.model_path}"
        raise ConfigError(message, hint="start another engine instead")


def require_same_number(old: ResolvedConfig, new: ResolvedConfig) -> None:
    """Check that a restart keeps the number of engines.

    Raises:
        ConfigError: the number differs.
    """
    if old.data_parallel_size != new.data_parallel_size:
        raise ConfigError(
            f"data_parallel_size {new.data_parallel_size}: {old.data_parallel_size} engines run, and a restart does "
            "not change their number",
            hint=f"leave --data-parallel-size at {old.data_parallel_size}, and use octavo admin engines add or remove",
        )


def require_changeable(config: ResolvedConfig, action: str) -> None:
    """Check that an operator may add or remove engines.

    Args:
        config: configuration of the engines.
        action: action of the operator.

    Raises:
        ConflictError: each of the engines has a part of the experts.
    """
    if config.is_lock_step and action in ("add", "remove", "replace"):
        raise ConflictError(
            f"{action}: the engines divide the experts (--enable-expert-parallel), so none can come or go alone; "
            "restart the server with another --data-parallel-size"
        )


def require_same_model(configs: Mapping[str, ResolvedConfig]) -> None:
    """Check that engines give the same results, as far as their configurations tell.

    Args:
        configs: configurations of the engines, by address.

    Raises:
        ConfigError: two configurations differ.
    """
    (first_address, first), *others = configs.items()
    for address, other in others:
        if _model_of(other) != _model_of(first):
            raise ConfigError(
                f"the engine at {address} serves {_described(other)}, and that at {first_address} {_described(first)}",
                hint="requests go to any of the engines: join those of one model, in one type",
            )


def require_same_bits(identities: Mapping[str, str]) -> None:
    """Check that engines compute the same bits.

    Args:
        identities: identities of the engines, by address.

    Raises:
        ConfigError: two identities differ.
    """
    (first_address, first), *others = identities.items()
    for address, other in others:
        if other != first:
            raise ConfigError(
                f"the engine at {address} does not compute the same bits as that at {first_address}: their weights, "
                "settings, releases or kinds of processors differ",
                hint="requests may move between the engines: join those that are alike",
            )


def _model_of(config: ResolvedConfig) -> tuple[object, ...]:
    model = config.model
    return model.architecture, model.hf_config, model.vocab_size, config.dtype, config.quantization


def _described(config: ResolvedConfig) -> str:
    return f"{config.model.model_path} in {config.dtype}" + (
        f" with {config.quantization}" if config.quantization != "none" else ""
    )
