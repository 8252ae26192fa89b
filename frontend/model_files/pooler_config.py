"""`PoolerConfig`: the value of `--pooler-config`, with the field names of current and older vLLM releases."""

from collections.abc import Mapping
from typing import Annotated, Any, cast

from msgspec import DecodeError, Meta, Struct, ValidationError, convert
from msgspec import json as msgspec_json

from octavo.protocol.errors import ConfigError
from octavo.protocol.pooling import PoolingTask, PoolingType

_SEQUENCE_TYPES = ("cls", "last", "mean")
_TOKEN_TYPES = ("all", "step")
_NOT_SUPPORTED = ("logit_mean", "logit_sigma", "logit_bias", "logit_scale", "max_embed_len")
"""Fields of vLLM that must be null here."""


class PoolerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that override the model's files. `None`: as the files say."""

    task: PoolingTask | None = None
    """Task of requests that do not name one."""
    pooling_type: str | None = None
    """Applies to the first of the next two fields that supports the type."""
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    """Older name of `use_activation`, like the next two fields."""
    activation: bool | None = None
    softmax: bool | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    """Length of embeddings, unless a request sets another one."""
    step_tag_id: Annotated[int, Meta(ge=0)] | None = None
    returned_token_ids: list[Annotated[int, Meta(ge=0)]] | None = None
    enable_flash_late_interaction: bool = True
    """Ignored."""
    enable_chunked_processing: bool = False
    logit_mean: float | None = None
    logit_sigma: float | None = None
    logit_bias: float | None = None
    logit_scale: float | None = None
    max_embed_len: int | None = None

    @property
    def activates(self) -> bool | None:
        """Whether embeddings are normalized and class scores go through their activation."""
        given = (self.use_activation, self.normalize, self.activation, self.softmax)
        return next((value for value in given if value is not None), None)

    @property
    def sequence_pooling(self) -> PoolingType | None:
        """Pooling of tasks with one result per prompt."""
        return cast(PoolingType | None, self._pooling(self.seq_pooling_type, _SEQUENCE_TYPES))

    @property
    def token_pooling(self) -> PoolingType | None:
        """Pooling of tasks with one result per token."""
        return cast(PoolingType | None, self._pooling(self.tok_pooling_type, _TOKEN_TYPES))

    def _pooling(self, own: str | None, known: tuple[str, ...]) -> str | None:
        name = (own or self.pooling_type or "").lower()
        return name if name in known else None


def read_pooler_config(given: Mapping[str, Any] | str | None) -> PoolerConfig:
    """Parse and check the settings.

    Raises:
        ConfigError: a field is unknown, malformed or not supported; the message names it.
    """
    try:
        value = msgspec_json.decode(given) if isinstance(given, str) else dict(given or {})
        config = convert(value, PoolerConfig)
    except (DecodeError, ValidationError) as error:
        raise invalid_pooler_config(str(error)) from None
    for name, kind, known in (
        ("pooling_type", config.pooling_type, (*_SEQUENCE_TYPES, *_TOKEN_TYPES)),
        ("seq_pooling_type", config.seq_pooling_type, _SEQUENCE_TYPES),
        ("tok_pooling_type", config.tok_pooling_type, _TOKEN_TYPES),
    ):
        if kind is not None and kind.lower() not in known:
            raise invalid_pooler_config(f"{name} {kind!r} is not one of {', '.join(known).upper()}")
    if config.pooling_type is not None and (config.seq_pooling_type or config.tok_pooling_type):
        raise invalid_pooler_config("pooling_type and seq_pooling_type or tok_pooling_type are both given")
    if config.enable_chunked_processing:
        raise invalid_pooler_config(
            "enable_chunked_processing is not supported: texts that are too long can be truncated"
        )
    for name in _NOT_SUPPORTED:
        if getattr(config, name) is not None:
            raise invalid_pooler_config(f"{name} is not supported")
    return config


def invalid_pooler_config(message: str) -> ConfigError:
    """Return the error for a field that is invalid, either in itself or for this model."""
    return ConfigError(
        f"pooler_config: {message}",
        hint="""write --pooler-config '{"pooling_type": "MEAN"}'; docs/pooling.md lists the fields""",
    )
