"""Flags generated from the configuration tree: parsing, help, and the YAML file whose settings they override.

Independent of individual settings: a new field of the tree becomes a new flag.
"""

import argparse
import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import msgspec

from octavo.frontend.cli.argv import normalize_argv
from octavo.frontend.cli.parser import CommandParser
from octavo.protocol.config import EngineConfig, ServerConfig
from octavo.protocol.config.sources import (
    FieldInfo,
    engine_branches,
    engine_config,
    engine_fields,
    parse_size,
    server_config,
    server_fields,
    spelled,
)
from octavo.protocol.config.vllm_compat import VLLM_SETTINGS, VllmSetting, translate_vllm_settings
from octavo.protocol.errors import ConfigError

_EPILOG = """\
{prog} --help=groups lists the groups above, --help=cache shows one, --help=prefix shows flags with that word.
Whole numbers may have a unit: 32k is 32 000, 32K is 32 768, 4G is 4 x 2^30.
"""


class FlagParser(CommandParser):
    """Flags generated from fields of the tree. The result omits flags that are not on the command line.

    Args:
        prog: the command, such as "octavo serve".
        description: the description of the command.
        operand: name of the positional argument.
    """

    def __init__(self, prog: str, description: str, operand: str = "MODEL") -> None:
        usage = "MODEL [FLAG ...]" if operand == "MODEL" else f"{operand} --model MODEL [FLAG ...]"
        super().__init__(prog, description, usage, _EPILOG.format(prog=prog), defaults=False)
        self._operand = operand

    def add_fields(self, name: str, title: str, fields: Iterable[FieldInfo]) -> None:
        """Add a group of flags; `--help=NAME` shows only this group."""
        group = self.add_named_group(name, title)
        for info in fields:
            add_field(group, info)

    def add_vllm_flags(self, settings: Iterable[VllmSetting]) -> None:
        """Add vLLM's flags without help texts. They have no effect, or are rejected with a reason."""
        for setting in settings:
            add_vllm_flag(self, setting)

    def parse_flags(self, argv: Sequence[str]) -> dict[str, Any]:
        """Return the settings given on the command line, by name.

        If the command line is invalid, print one line and exit with code 2.
        """
        return vars(self.parse(normalize_argv(argv)))

    def parse_settings(self, argv: Sequence[str], *, may_join: bool = False) -> dict[str, Any]:
        """Return the settings of the command line, merged over those of the `--config` file.

        If the command line is invalid or names no model, print one line and exit with code 2.

        Args:
            argv: the command line's arguments.
            may_join: whether --join is accepted instead of a model.

        Raises:
            ConfigError: the file is invalid.
        """
        given = self.parse_flags(argv)
        positional, path = given.pop("positional_model", None), given.pop("config", None)
        if positional is not None:
            if given.get("model", positional) != positional:
                self.error(f"two models are named: {positional} and {given['model']}")
            given["model"] = positional
        settings = (read_config_file(path) if path else {}) | given
        if "model" not in settings and not (may_join and settings.get("join")):
            self.error("which model? Name a directory, a .gguf file or a hub id")
        return settings

    def _unknown(self, word: str) -> str:
        return super()._unknown(word) + ("" if word.startswith("-") else f": there is one {self._operand}")


def add_field(group: argparse._ActionsContainer, info: FieldInfo, **options: Any) -> None:
    """Add the flag of a field, with additional options of `add_argument`."""
    flags = [spelled(name) for name in (info.name, *info.aliases)]
    group.add_argument(*flags, *info.short, dest=info.name, help=_help(info), **_argument(info), **options)


def add_vllm_flag(group: argparse._ActionsContainer, setting: VllmSetting, **options: Any) -> None:
    """Add a flag that only vLLM has, without a help text, with additional options of `add_argument`."""
    flags = [spelled(setting.name), *([setting.short] if setting.short else [])]
    kinds: dict[str, dict[str, Any]] = {
        "switch": {"action": argparse.BooleanOptionalAction},
        "value": {},
        "list": {"nargs": "+"},
    }
    group.add_argument(*flags, dest=setting.name, help=argparse.SUPPRESS, **kinds[setting.kind], **options)


def config_parser(prog: str, description: str, *, has_server: bool = True, operand: str = "MODEL") -> FlagParser:
    """Return a parser for MODEL, `--config` and every field of the tree.

    Args:
        prog: the command, such as "octavo serve".
        description: the description of the command.
        has_server: whether to add the fields of the HTTP server.
        operand: name of the positional argument. If it is not MODEL, the command adds that argument itself.
    """
    parser = FlagParser(prog, description, operand)
    if operand == "MODEL":
        parser.add_argument("positional_model", metavar="MODEL", nargs="?", help="the same as --model")
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of settings, named like the flags, which take precedence"
    )
    for branch, struct in engine_branches().items():
        title = _title(struct)
        parser.add_fields(branch, title, [info for info in engine_fields() if info.branch == branch])
    if has_server:
        parser.add_fields("server", _title(ServerConfig), server_fields())
    parser.add_vllm_flags(VLLM_SETTINGS.values())
    return parser


_OF_JOINING = ("client_secret_key_file", "engine_public_key_file")
"""Settings that require --join."""


def configurations(settings: Mapping[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    """Split settings into the engine's and the server's configuration.

    Raises:
        ConfigError: a value has the wrong type or is out of bounds, or a vLLM setting is not supported; the message
        names the setting.
    """
    settings = translate_vllm_settings(settings)
    for name in _OF_JOINING:
        if settings.get(name):
            raise ConfigError(
                f"{name} applies only to a server that joins an engine, but this one starts its own",
                hint=f"leave out {spelled(name)}, or name the engine with --join",
            )
    names = {info.name for info in server_fields()}
    engine = engine_config({name: value for name, value in settings.items() if name not in names})
    return engine, server_config({name: value for name, value in settings.items() if name in names})


def joining_server(settings: Mapping[str, Any]) -> ServerConfig:
    """Return the configuration of a server that joins a running engine.

    Raises:
        ConfigError: as in `configurations`, or a setting belongs to the engine or to a server with its own engine.
    """
    settings = translate_vllm_settings(settings)
    own = {info.name for info in server_fields()} - {"headless", "engine_address"}
    for name in settings:
        if name not in own:
            raise ConfigError(
                f"{name} configures an engine, but --join names one that is already running",
                hint=f"leave out {'MODEL' if name == 'model' else spelled(name)}, or --join",
            )
    return server_config(settings)


def read_config_file(path: str) -> dict[str, Any]:
    """Read settings from a YAML file. Names may have dashes or underscores.

    Raises:
        ConfigError: the file cannot be read, or has an unknown setting.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} must hold settings, one per line: name: value")
    fields = {name: info for info in (*engine_fields(), *server_fields()) for name in (info.name, *info.aliases)}
    return dict(_file_setting(path, str(key), value, fields) for key, value in content.items())


def _file_setting(path: str, key: str, value: Any, fields: Mapping[str, FieldInfo]) -> tuple[str, Any]:
    name = key.replace("-", "_")
    if name in VLLM_SETTINGS:
        return name, value
    if name not in fields:
        close = difflib.get_close_matches(name, fields, n=1)
        hint = f"did you mean {close[0].replace('_', '-')}?" if close else "octavo serve --help lists every setting"
        raise ConfigError(f"{path}: unknown setting {key!r}", hint=hint)
    kinds = _kinds(fields[name].type)
    if isinstance(value, str) and int in kinds:
        try:
            value = _number(value, kinds)
        except ValueError as error:
            raise ConfigError(f"{path}: {key}: {error}") from None
    if isinstance(value, str) and _is_list(fields[name].type):
        value = [value]
    return fields[name].name, value


def _title(struct: type[msgspec.Struct]) -> str:
    return (struct.__doc__ or "").split("\n")[0].rstrip(".")


def _argument(info: FieldInfo) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a field's type."""
    kinds = _kinds(info.type)
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    if _is_list(info.type):
        return {"action": _ListAction, "nargs": "+", "metavar": "NAME" if "name" in info.name else "VALUE"}
    if int in kinds:
        return {"type": lambda text: _number_argument(text, kinds), "metavar": "N"}
    if float in kinds:
        return {"type": float, "metavar": "X"}
    choices = [kind for kind in kinds if isinstance(kind, str)]
    return {"choices": choices} if choices else {"metavar": "TEXT"}


class _ListAction(argparse.Action):
    """Collects the values of all occurrences of a flag. A value may be a JSON list, as in vLLM."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        """Add the values after the flag."""
        items: list[str] = list(getattr(namespace, self.dest, None) or [])
        for word in values:
            try:
                items += msgspec.json.decode(word, type=list[str]) if word.startswith("[") else [word]
            except msgspec.DecodeError as error:
                raise argparse.ArgumentError(self, f"{word} is not a JSON list of strings: {error}") from None
        setattr(namespace, self.dest, items)


def _kinds(kind: Any) -> list[Any]:
    """Return the members of a union, and the values of a Literal."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if get_origin(kind) is None or _is_list(kind):
        return [kind]
    return [member for part in get_args(kind) if part is not NoneType for member in _kinds(part)]


def _is_list(kind: Any) -> bool:
    return get_origin(kind) is list or any(get_origin(part) is list for part in get_args(kind))


def _number(text: str, kinds: Sequence[Any]) -> int | str:
    """Parse an integer, optionally with a unit, or one of the field's literals (such as "auto")."""
    if text in kinds:
        return text
    return int(text) if text.startswith("-") and text[1:].isdigit() else parse_size(text)


def _number_argument(text: str, kinds: Sequence[Any]) -> int | str:
    try:
        return _number(text, kinds)
    except ValueError as error:
        # argparse shows the message only of its own error type.
        raise argparse.ArgumentTypeError(str(error)) from None


def _help(info: FieldInfo) -> str:
    """Return the description, with the default if there is one."""
    text = info.description.replace("%", "%%")
    if "Default:" in text or info.default is None or info.default is msgspec.NODEFAULT:
        return text
    default = info.default
    if isinstance(default, bool):
        default = "on" if default else "off"
    return f"{text} Default: {default}."
