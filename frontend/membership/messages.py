"""Messages between the first HTTP process, which decides about the engines, and the others, which follow it.

They go over a Unix socket in the engine's private directory, in the framing of `protocol/control.py`: a length of 4
bytes and a msgpack body. Both sides are always of one release.
"""

import asyncio
import struct
from typing import Literal, TypeAlias

import msgspec

from octavo.frontend.engine_state import EngineState

SOCKET_NAME = "engines"

_LENGTH = struct.Struct("<I")

Action: TypeAlias = Literal["list", "add", "drain", "resume", "remove", "replace"]


class EngineEntry(msgspec.Struct, frozen=True):
    """An engine that HTTP processes join."""

    index: int
    address: str
    state: EngineState
    is_leaving: bool = False
    """Its requests move to other engines."""
    is_gone: bool = False
    """It has failed for good, and cannot be joined."""
    public_key_file: str | None = None
    """Of the engine, if it is on another machine and has another key than `--engine-public-key-file`."""
    is_local: bool = True
    """The first process has started it. Another process may replace those that it has not, at the same address."""


class Membership(msgspec.Struct, frozen=True, tag="membership"):
    """All engines, sent to every process after each change."""

    version: int
    engines: list[EngineEntry]


class Report(msgspec.Struct, frozen=True, tag="report"):
    """What a process has made of a `Membership`; sent whenever that changes."""

    version: int = -1
    """The latest that it has applied. Joining takes longer."""
    joined: list[int] = []
    """Engines that it is connected to."""
    busy: list[int] = []
    """Engines that it still needs for live requests, of those that drain."""


class AdminCommand(msgspec.Struct, frozen=True, tag="command"):
    """What an operator wants."""

    action: Action
    index: int | None = None
    """Of the engine, for drain, resume and remove."""
    address: str | None = None
    """Of a running engine to add; None: start one."""
    public_key_file: str | None = None
    """Of that engine, if it is on another machine; None: `--engine-public-key-file`."""
    model: str | None = None
    """To replace the engines with; None: the configured one, read again."""
    timeout_s: float | None = None
    """How long requests may take to finish where they are, before they move; None: no limit."""
    call_id: int = 0
    """Identifies the answer, between processes."""


class EngineStatus(msgspec.Struct, frozen=True):
    """An engine, for operators."""

    index: int
    state: str
    """starting, up, draining or down."""
    reason: str = ""
    """Why it is down."""
    address: str = ""
    model: str = ""
    weights: str = ""
    """Digest of the weights."""
    is_local: bool = True
    """This server has started it."""
    num_running: int = 0
    num_waiting: int = 0


class AdminResult(msgspec.Struct, frozen=True, tag="result"):
    """The answer to an operator."""

    status: int = 200
    message: str = ""
    """Why the command failed."""
    engines: list[EngineStatus] = []
    call_id: int = 0


Message: TypeAlias = Membership | Report | AdminCommand | AdminResult

_DECODER = msgspec.msgpack.Decoder(Message)


async def receive(reader: asyncio.StreamReader) -> Message | None:
    """Return the next message; None: the other side is gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        message: Message = _DECODER.decode(await reader.readexactly(length))
        return message
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def send(writer: asyncio.StreamWriter, message: Message) -> None:
    """Send a message; one to a process that is gone is lost."""
    if not writer.is_closing():
        body = msgspec.msgpack.encode(message)
        writer.write(_LENGTH.pack(len(body)) + body)
