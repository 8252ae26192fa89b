"""--structured-outputs-config: vLLM's settings of structured output."""

import logging
from typing import Literal

import msgspec

from octavo.protocol.errors import ConfigError

logger = logging.getLogger(__name__)


class _StructuredOutputsConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of vLLM's class of this name that apply here: octavo has one backend."""

    backend: Literal["auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer"] = "auto"
    """vLLM's names; llguidance does the work of all of them."""
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False


def resolve_structured_outputs(text: str | None) -> tuple[bool, bool]:
    """Return `disable_any_whitespace` and `disable_additional_properties`.

    Raises:
        ConfigError: it is not an object with fields of that class.
    """
    try:
        overrides = msgspec.json.decode(text or "{}", type=_StructuredOutputsConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"structured_outputs_config: {error}",
            phase="configuration",
            hint=f"it is a JSON object with some of {', '.join(_StructuredOutputsConfig.__struct_fields__)}",
        ) from None
    if overrides.backend not in ("auto", "guidance"):
        logger.info("--structured-outputs-config: llguidance does the work of the backend %s", overrides.backend)
    return overrides.disable_any_whitespace, overrides.disable_additional_properties
