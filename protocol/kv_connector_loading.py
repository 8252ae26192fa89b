"""Imports the connector named in `--kv-transfer-config`."""

import importlib
from types import ModuleType

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import ConfigError
from octavo.protocol.kv_connector import KVConnectorBase, KVConnectorConfig, KVConnectorRole
from octavo.protocol.module_files import NotAPythonFileError, load_module_of_file


def open_kv_connector(config: ResolvedConfig, role: KVConnectorRole, rank: int = -1) -> KVConnectorBase:
    """Create the connector of an engine for this process.

    Args:
        config: the engine's configuration, which names a connector.
        role: role of this process.
        rank: rank of the worker.

    Raises:
        ConfigError: the connector cannot be imported or created.
    """
    setting = config.kv_connector
    assert setting is not None, "the engine has no connector"
    name = f"{setting.module_path}.{setting.name}"
    own = KVConnectorConfig(setting.extra_config, config.block_size, config.world_size, rank)
    try:
        kind = getattr(_module(setting.module_path), setting.name)
        if not (isinstance(kind, type) and issubclass(kind, KVConnectorBase)):
            raise _error(f"{name} does not derive from octavo.KVConnectorBase")
        connector = kind(own, role)
    except ConfigError:
        raise
    except Exception as error:  # user code may raise anything
        raise _error(f"{name}: {type(error).__name__}: {error}") from error
    return connector


def _module(path: str) -> ModuleType:
    if not path.endswith(".py"):
        return importlib.import_module(path)
    try:
        return load_module_of_file(path, "octavo_kv_connector")
    except NotAPythonFileError as error:
        raise _error(str(error)) from None


def _error(message: str) -> ConfigError:
    return ConfigError(
        f"kv_transfer_config: {message}",
        hint="kv_connector_module_path is a module that the engine can import (PYTHONPATH) or a .py file, and "
        "kv_connector a class in it; docs/kv-connectors.md has an example",
    )
