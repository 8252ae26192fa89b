"""Request bodies of the operators' routes, and the list of engines that all of these routes return."""

from typing import Annotated

from msgspec import Meta, Struct

from octavo.frontend.membership.messages import EngineStatus

Timeout = Annotated[float, Meta(ge=0)]


class AddEngine(Struct, kw_only=True):
    """An engine to add: a new one, or a running one."""

    address: Annotated[str, Meta(min_length=1)] | None = None
    """Address of a running engine; None: this server starts one with its own configuration."""
    engine_public_key_file: str | None = None
    """File on this server with the public key of an engine on another machine; None: --engine-public-key-file."""


class DrainEngine(Struct, kw_only=True):
    """An engine that gets no new requests."""

    index: Annotated[int, Meta(ge=0)]
    timeout: Timeout | None = None
    """Seconds after which other engines continue its requests; None: they finish on this engine."""


class ResumeEngine(Struct, kw_only=True):
    """A draining engine that should serve again."""

    index: Annotated[int, Meta(ge=0)]


class ReplaceEngines(Struct, kw_only=True):
    """The replacement for the serving engines."""

    model: Annotated[str, Meta(min_length=1)] | None = None
    """Directory, .gguf file or hub id; None: the configured model, loaded again."""


class EngineList(Struct, kw_only=True):
    """The engines of the server."""

    data: list[EngineStatus]
    object: str = "list"
