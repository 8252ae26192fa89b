"""Sets up the adapters of a server: those of the command line, and the directory from which others are loaded."""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from octavo.protocol.config import ServerConfig
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from octavo.frontend.lora.registry import AdapterRegistry

_FORM = 'give NAME=DIRECTORY, or {"name": "...", "path": "...", "base_model_name": "..."}'


class LoRAModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of `--lora-modules`."""

    name: str
    path: str
    base_model_name: str | None = None
    is_3d_lora_weight: bool = False
    """See `LoRARequest`."""


def lora_modules(config: ServerConfig) -> list[LoRAModule]:
    """Return the adapters of the command line.

    Raises:
        ConfigError: an entry has neither form, or two entries have the same name.
    """
    modules = [_module(text) for text in config.lora_modules or ()]
    names = [module.name for module in modules]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"lora_modules: two adapters are named {twice!r}", hint=_FORM)
    return modules


def allows_updates(config: ServerConfig) -> bool:
    """Return whether adapters may be loaded and unloaded by HTTP."""
    return config.allow_runtime_lora_updating or Env.read().allows_lora_updates


def require_no_modules(config: ServerConfig) -> None:
    """Reject `lora_modules` for an application that is created before adapters can be loaded.

    Raises:
        ConfigError: the configuration has some.
    """
    if config.lora_modules:
        raise ConfigError(
            "lora_modules are loaded by octavo serve only",
            hint="use await client.adapters.load(name, path) before the application serves",
        )


def check_flags(config: ServerConfig, *, has_adapters: bool) -> None:
    """Check a server's flags about adapters.

    Raises:
        ConfigError: a flag cannot be used, or the engine has no adapters.
    """
    given = {
        "--lora-modules": lora_modules(config),
        "--lora-resolver-dir": config.lora_resolver_dir,
        "--allow-runtime-lora-updating": config.allow_runtime_lora_updating,
    }
    flag = next((flag for flag, value in given.items() if value), None)
    if flag and (config.headless or not has_adapters):
        needed = (
            "an HTTP server, which --headless has not"
            if config.headless
            else "an engine with --enable-lora, or with --enable-prompt-embeds for soft prompts"
        )
        raise ConfigError(f"{flag} needs {needed}", hint=f"leave out {flag}")
    _resolver_dir(config)


def open_resolver(config: ServerConfig, adapters: "AdapterRegistry", *, has_adapters: bool) -> None:
    """Let a client load adapters by name from the configured directory, if there is one.

    Raises:
        ConfigError: as for `check_flags`.
    """
    check_flags(config, has_adapters=has_adapters)
    if has_adapters:
        adapters.resolver_dir = _resolver_dir(config)


def _resolver_dir(config: ServerConfig) -> Path | None:
    directory = config.lora_resolver_dir or Env.read().lora_resolver_dir
    if directory is None:
        return None
    if not (path := Path(directory).expanduser().absolute()).is_dir():
        raise ConfigError(
            f"lora_resolver_dir: {path} is not a directory",
            hint="name one with a directory for each adapter",
        )
    return path


async def load_modules(config: ServerConfig, adapters: "AdapterRegistry") -> None:
    """Load the adapters of the command line.

    Raises:
        ConfigError: an adapter cannot be used.
    """
    for module in lora_modules(config):
        try:
            await adapters.load(module.name, module.path, module.base_model_name)
        except InvalidRequestError as error:
            raise ConfigError(
                f"lora_modules: {module.name}: {error.message}",
                hint="correct it, or leave it out",
            ) from error


def _module(text: str) -> LoRAModule:
    try:
        if text.lstrip().startswith("{"):
            module = msgspec.json.decode(text, type=LoRAModule)
        else:
            name, _, path = text.partition("=")
            module = LoRAModule(name, path)
    except msgspec.DecodeError as error:
        raise ConfigError(f"lora_modules: {text!r}: {error}", hint=_FORM) from None
    if not module.name or not module.path:
        raise ConfigError(f"lora_modules: {text!r} lacks a name or a path", hint=_FORM)
    return module
