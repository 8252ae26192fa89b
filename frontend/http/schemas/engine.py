"""`/load`, `/server_info`, and calls that only report success."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType


class Load(Struct):
    """How busy the server is."""

    server_load: int
    """Number of requests that run or wait."""


class ServerInfo(Struct, kw_only=True):
    """The served models and their configuration."""

    version: str
    models: list[str]
    max_model_len: int
    num_blocks: int
    config: dict[str, Any]
    """The engine's resolved configuration."""


class Done(Struct, kw_only=True):
    """The call succeeded."""

    success: bool = True
    directory: str | UnsetType = UNSET
    """Directory of the traces."""


class Version(Struct):
    """The version of octavo."""

    version: str


class Unhealthy(Struct):
    """Why the engine is not healthy."""

    status: str
    reason: str
