"""The routes of operators: requests, and the list of engines that all of them return."""

from typing import Annotated

from msgspec import Meta, Struct

from octavo.frontend.membership.messages import EngineStatus

Timeout = Annotated[float, Meta(ge=0)]


class AddEngine(Struct, kw_only=True):
    """An engine to be added: a new one, or one that runs."""

    address: Annotated[str, Meta(min_length=1)] | None = None
    """Of a running engine; None: this server starts one with its own configuration."""
    engine_public_key_file: str | None = None
    """Public key of a running engine on another machine, on this server; None: --engine-public-key-file."""


class DrainEngine(Struct, kw_only=True):
    """An engine that gets no new requests."""

    index: Annotated[int, Meta(ge=0)]
    timeout: Timeout | None = None
    """Seconds after which other engines continue its requests; None: they finish there."""


class ResumeEngine(Struct, kw_only=True):
    """An engine that drains and shall serve again."""

    index: Annotated[int, Meta(ge=0)]


class ReplaceEngines(Struct, kw_only=True):
    """What replaces the engines that serve."""

    model: Annotated[str, Meta(min_length=1)] | None = None
    """Directory, .gguf file or hub id; None: the configured model, read again."""


class EngineList(Struct, kw_only=True):
    """The engines of the server."""

    data: list[EngineStatus]
    object: str = "list"
