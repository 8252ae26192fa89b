"""Messages between the first HTTP process, which decides about the engines, and the other HTTP processes.

They travel over a Unix socket in the engine's private directory, in the framing of `protocol/control.py`: a length of
four bytes and a msgpack body. Both sides are always of the same release.
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
    """Whether its requests are to move to other engines."""
    is_gone: bool = False
    """Whether it has failed for good and cannot be joined."""
    public_key_file: str | None = None
    """Public key file of the engine, if it is on another machine and its key is not `--engine-public-key-file`."""
    is_local: bool = True
    """Whether the first process has started it. Other processes may replace their engines at the same address."""


class Membership(msgspec.Struct, frozen=True, tag="membership"):
    """All engines; sent to every process after each change."""

    version: int
    engines: list[EngineEntry]


class Report(msgspec.Struct, frozen=True, tag="report"):
    """A process's progress in applying a `Membership`; sent whenever it changes."""

    version: int = -1
    """Latest version that the process has applied. Joining engines takes longer."""
    joined: list[int] = []
    """Indices of the engines that it is connected to."""
    busy: list[int] = []
    """Indices of draining engines that it still needs for live requests."""


class AdminCommand(msgspec.Struct, frozen=True, tag="command"):
    """A command of an operator."""

    action: Action
    index: int | None = None
    """Index of the engine, for drain, resume and remove."""
    address: str | None = None
    """Address of a running engine to add. `None`: start one."""
    public_key_file: str | None = None
    """Public key file of that engine, if it is on another machine. `None`: `--engine-public-key-file`."""
    model: str | None = None
    """Model of the new engines, for replace. `None`: the configured model, read again."""
    timeout_s: float | None = None
    """Seconds that requests may take to finish before they move to other engines. `None`: no limit."""
    call_id: int = 0
    """Matches the result to the command, between processes."""


class EngineStatus(msgspec.Struct, frozen=True):
    """State of an engine, for operators."""

    index: int
    state: str
    """"starting", "up", "draining" or "down"."""
    reason: str = ""
    """Why it is down."""
    address: str = ""
    model: str = ""
    weights: str = ""
    """Digest of the weights."""
    is_local: bool = True
    """Whether this server has started it."""
    num_running: int = 0
    num_waiting: int = 0


class AdminResult(msgspec.Struct, frozen=True, tag="result"):
    """The reply to an operator."""

    status: int = 200
    message: str = ""
    """Why the command failed."""
    engines: list[EngineStatus] = []
    call_id: int = 0


Message: TypeAlias = Membership | Report | AdminCommand | AdminResult

_DECODER = msgspec.msgpack.Decoder(Message)


async def receive(reader: asyncio.StreamReader) -> Message | None:
    """Return the next message. `None` if the other side has disconnected."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        message: Message = _DECODER.decode(await reader.readexactly(length))
        return message
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def send(writer: asyncio.StreamWriter, message: Message) -> None:
    """Send a message; it is lost if the other process is gone."""
    if not writer.is_closing():
        body = msgspec.msgpack.encode(message)
        writer.write(_LENGTH.pack(len(body)) + body)
