"""--structured-outputs-config: vLLM's settings of structured output."""

from typing import Literal

import msgspec

from octavo.protocol.errors import ConfigError


class _StructuredOutputsConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of vLLM's class of this name that apply here: octavo has one backend."""

    backend: Literal["auto", "guidance"] = "auto"
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
    return overrides.disable_any_whitespace, overrides.disable_additional_properties
