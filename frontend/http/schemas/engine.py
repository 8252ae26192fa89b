"""`/load`, `/server_info`, and the calls that only report success."""

from typing import Any

from msgspec import UNSET, Struct, UnsetType


class Load(Struct):
    """How busy the server is."""

    server_load: int
    """Requests that run or wait."""


class ServerInfo(Struct, kw_only=True):
    """What is served, and how."""

    version: str
    models: list[str]
    max_model_len: int
    num_blocks: int
    config: dict[str, Any]
    """The engine's configuration with nothing left open."""


class Done(Struct, kw_only=True):
    """The call succeeded."""

    success: bool = True
    directory: str | UnsetType = UNSET
    """Where the traces are."""


class Version(Struct):
    """The version of octavo."""

    version: str


class Unhealthy(Struct):
    """Why the engine is not healthy."""

    status: str
    reason: str
