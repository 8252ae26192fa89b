"""Main loop of a process that decodes untrusted files: runs jobs within a memory limit. Independent of the kind of
file.

The parent's side is `octavo.frontend.media.child_processes`.
"""

import resource
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import msgspec

from octavo.frontend.media.wire import LENGTH, Ready
from octavo.protocol.lifecycle import die_with_parent


class ChildSetup(Protocol):
    """The first message to a decoding process."""

    parent: int
    """Process id of the parent."""


Setup = TypeVar("Setup", bound=ChildSetup)


@dataclass(frozen=True)
class Decoder:
    """What a process has loaded to decode files."""

    answer: Callable[[Any], msgspec.Struct]
    """Runs a job and returns the reply."""
    num_bytes: int
    """Bytes that a job may allocate, in addition to what is loaded."""
    placeholder: str = ""
    """Text of the placeholder; see `Ready`."""
    placeholder_id: int = -1


def serve(
    setup_type: type[Setup],
    job_type: type[msgspec.Struct],
    load: Callable[[Setup], Decoder],
    fault: Callable[[str], msgspec.Struct],
) -> None:
    """Reply to messages from standard input until it is closed.

    Args:
        setup_type: type of the first message.
        job_type: type of all further messages.
        load: loads what the jobs need, given the first message.
        fault: makes the reply to a failed job from the reason.
    """
    warnings.simplefilter("ignore")
    source, target = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # libraries may print to stdout, which carries the replies
    setup = msgspec.msgpack.decode(_read(source), type=setup_type)
    die_with_parent(setup.parent)
    try:
        decoder = load(setup)
    except Exception as error:  # process boundary: code of transformers reads files of the model
        _write(target, Ready("", f"{type(error).__name__}: {error}"))
        return
    _limit_memory(decoder.num_bytes)
    _write(target, Ready(decoder.placeholder, placeholder_id=decoder.placeholder_id))
    while data := _read(source):
        try:
            answer = decoder.answer(msgspec.msgpack.decode(data, type=job_type))
        except MemoryError:
            answer = fault("it takes too much memory")
        except Exception as error:  # process boundary: decoders raise anything for damaged files
            answer = fault(f"it cannot be decoded: {type(error).__name__}: {error}"[:300])
        _write(target, answer)


def _limit_memory(num_bytes: int) -> None:
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = num_pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _read(file: BinaryIO) -> bytes:
    """Return the next message. `b""` if the other side has closed the pipe."""
    head = file.read(LENGTH.size)
    return file.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""


def _write(file: BinaryIO, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    file.write(LENGTH.pack(len(data)))
    file.write(data)
    file.flush()
