"""`--structured-outputs-config`: vLLM's settings of structured output."""

import logging
from typing import Literal

import msgspec

from octavo.protocol.config.engine import StructuredConfig
from octavo.protocol.errors import ConfigError

logger = logging.getLogger(__name__)


class _StructuredOutputsConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of vLLM's class of this name that apply here. octavo has only one backend."""

    backend: Literal["auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"] = "auto"
    """vLLM's names. octavo uses llguidance for all of them."""
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False


class ResolvedStructuredOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on grammars and schemas, and the format of the JSON of all requests."""

    max_grammar_bytes: int
    grammar_timeout_s: int
    """In seconds of CPU time."""
    disable_any_whitespace: bool
    disable_additional_properties: bool


def resolve_structured_output(config: StructuredConfig) -> ResolvedStructuredOutput:
    """Parse `structured_outputs_config`.

    Raises:
        ConfigError: it is not an object with fields of vLLM's class.
    """
    try:
        overrides = msgspec.json.decode(config.structured_outputs_config or "{}", type=_StructuredOutputsConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"structured_outputs_config: {error}",
            hint=f"it is a JSON object with some of {', '.join(_StructuredOutputsConfig.__struct_fields__)}",
        ) from None
    if overrides.backend not in ("auto", "guidance"):
        logger.info("--structured-outputs-config: llguidance is used instead of the backend %s", overrides.backend)
    return ResolvedStructuredOutput(
        max_grammar_bytes=config.max_grammar_bytes,
        grammar_timeout_s=config.grammar_timeout,
        disable_any_whitespace=overrides.disable_any_whitespace,
        disable_additional_properties=overrides.disable_additional_properties,
    )
