"""`EngineArgs` and `AsyncEngineArgs`: every setting of the engine as a field, and as a flag of a script."""

import argparse
from collections.abc import Mapping
from dataclasses import field, fields, make_dataclass
from typing import Any, TypeVar

import msgspec

from octavo.frontend.cli.flags import add_field, add_vllm_flag
from octavo.protocol.config.sources import engine_fields
from octavo.protocol.config.vllm_compat import VLLM_SETTINGS

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
"""vLLM's default model."""


def _defaults() -> dict[str, Any]:
    """Return every setting with its default; settings that only vLLM has are `None`."""
    found: dict[str, Any] = {}
    for info in engine_fields():
        found[info.name] = DEFAULT_MODEL if info.default is msgspec.NODEFAULT else info.default
        found.update(dict.fromkeys(info.aliases))
    return found | dict.fromkeys(VLLM_SETTINGS)


DEFAULTS = _defaults()


def changed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from their defaults: those that a script has chosen."""
    return {
        name: value
        for name, value in settings.items()
        if name == "model" or name not in DEFAULTS or value != DEFAULTS[name]
    }


class _Methods:
    @classmethod
    def add_cli_args(cls, parser: Parser) -> Parser:
        """Add a flag for every field, and return the parser."""
        groups: dict[str, Any] = {}
        for info in engine_fields():
            group = groups.setdefault(info.branch, None) or parser.add_argument_group(info.branch)
            groups[info.branch] = group
            add_field(group, info, default=DEFAULTS[info.name])
        for setting in VLLM_SETTINGS.values():
            add_vllm_flag(parser, setting, default=None)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Any:
        """Construct from the parsed arguments of a script."""
        names = {one.name for one in fields(cls)}  # type: ignore[arg-type]
        return cls(**{name: value for name, value in vars(args).items() if name in names})

    def settings(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults."""
        return changed(vars(self))


_FIELDS = [(name, Any, field(default=default)) for name, default in DEFAULTS.items()]

EngineArgs: Any = make_dataclass("EngineArgs", _FIELDS, bases=(_Methods,), namespace={"__module__": __name__})
"""Settings of an engine under vLLM's names, as a dataclass whose first field is `model`."""


class _AsyncMethods(_Methods):
    @classmethod
    def add_cli_args(cls, parser: Parser, async_args_only: bool = False) -> Parser:
        """Add a flag for every field, or only for those that `EngineArgs` does not have."""
        parser.add_argument("--enable-log-requests", action=argparse.BooleanOptionalAction, default=False)
        return parser if async_args_only else super().add_cli_args(parser)


AsyncEngineArgs: Any = make_dataclass(
    "AsyncEngineArgs",
    [*_FIELDS, ("enable_log_requests", bool, field(default=False))],
    bases=(_AsyncMethods,),
    namespace={"__module__": __name__},
)
"""The same for `AsyncLLM`. `enable_log_requests` is ignored: there is no server that would log them."""
