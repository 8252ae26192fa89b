"""Recordings of a scheduler's calls: written while the engine runs, and replayed later.

A file is a sequence of `LogEntry` messages: a 4-byte little-endian length, then a msgpack body.
"""

import contextlib
import logging
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import msgspec

from octavo.core_proc.log_entries import (
    Aborted,
    BlocksTaken,
    CacheReset,
    Committed,
    Drafted,
    Ended,
    FilesChanged,
    LoadFinished,
    LogEntry,
    Opened,
    Planned,
    Restricted,
    Submitted,
    WeightsSet,
    WorkersLost,
)
from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.protocol import PROTOCOL_VERSION
from octavo.protocol.codec import wire_bytes, wire_value
from octavo.protocol.config import CachePlan, ResolvedConfig
from octavo.protocol.errors import ConfigError, ProtocolError
from octavo.protocol.steps import StepPlan

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")


class Recorder:
    """Observes a scheduler and writes every call to a file. If the disk is full, the recording ends with a log line and
    the engine continues.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: Path, config: ResolvedConfig, cache_plan: CachePlan) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=wire_bytes)
        self._path = path
        self._is_whole = True
        """False after a write has failed."""
        try:
            self._file = path.open("wb")
            with contextlib.ExitStack() as unless_begun:
                unless_begun.callback(self._discard)
                self._file.write(self._frame(Opened(config, cache_plan)))
                self._file.flush()
                unless_begun.pop_all()
        except OSError as error:
            raise ConfigError(
                f"cannot record steps in {path}: {error.strerror}",
                phase="opening the recording",
                hint="--record-steps needs the name of a writable file",
            ) from error

    def __call__(self, scheduler: Scheduler, entry: LogEntry) -> None:
        """Write an entry."""
        if not self._is_whole:
            return
        try:
            self._file.write(self._frame(entry))
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file. A recording that was not closed can be read up to its last complete entry."""
        if not self._is_whole:
            return
        try:
            self._file.close()
        except OSError as error:
            self._give_up(error)

    def _frame(self, entry: LogEntry) -> bytes:
        body = self._encoder.encode(entry)
        return _LENGTH.pack(len(body)) + body

    def _give_up(self, error: OSError) -> None:
        """End the recording at this point."""
        self._is_whole = False
        logger.error("stopped recording steps in %s: %s; the engine continues", self._path, error.strerror)
        self._discard()

    def _discard(self) -> None:
        with contextlib.suppress(OSError):  # closing flushes, which fails again
            self._file.close()


@dataclass(frozen=True)
class Replay:
    """The outcome of a replay."""

    num_plans: int
    """Number of plans compared, including the first one that differs."""
    recorded: StepPlan | None = None
    replayed: StepPlan | None = None
    """The first pair of plans that differ. Both are None if no plans differ."""

    @property
    def is_identical(self) -> bool:
        """True if every plan equals the recorded one."""
        return self.recorded is None and self.replayed is None


def read_recording(path: Path) -> Iterator[LogEntry]:
    """Yield the entries of a recording, except for a truncated last entry.

    Raises:
        ProtocolError: the file is not a recording, or has another version.
    """
    decoder: msgspec.msgpack.Decoder[LogEntry] = msgspec.msgpack.Decoder(LogEntry, dec_hook=wire_value)
    with path.open("rb") as file:
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (size,) = _LENGTH.unpack(head)
            body = file.read(size)
            if len(body) < size:
                return
            try:
                yield decoder.decode(body)
            except msgspec.MsgspecError as error:
                raise ProtocolError(
                    f"{path} is not a recording of this version (scripts/convert_recording reads older ones): {error}"
                ) from error


def replay(entries: Iterator[LogEntry]) -> Replay:
    """Feed the recorded inputs to a new scheduler and compare its plans, up to the first difference.

    Raises:
        ProtocolError: the recording does not start with `Opened`, or has another version.
    """
    opened = next(entries, None)
    if not isinstance(opened, Opened):
        raise ProtocolError("the first entry of a recording must be Opened")
    if opened.version != PROTOCOL_VERSION:
        raise ProtocolError(f"the recording has protocol version {opened.version}, this scheduler {PROTOCOL_VERSION}")
    scheduler = Scheduler(opened.config, opened.cache_plan, clock=lambda: 0.0)
    num_plans = 0
    for entry in entries:
        if not isinstance(entry, Planned):
            _repeat(scheduler, entry)
            continue
        plan = scheduler.plan()
        num_plans += entry.plan is not None or plan is not None
        if plan != entry.plan:
            return Replay(num_plans, recorded=entry.plan, replayed=plan)
    return Replay(num_plans)


def _repeat(scheduler: Scheduler, entry: LogEntry) -> None:
    """Repeat a recorded call whose result is not compared."""
    match entry:
        case Submitted():
            scheduler.submit(entry.client, entry.submit)
        case Aborted():
            scheduler.abort(entry.client, entry.request_ids)
        case Ended():
            scheduler.conclude(scheduler.requests[entry.client, entry.request_id])
        case CacheReset():
            scheduler.reset_prefix_cache()
        case BlocksTaken():
            scheduler.take_blocks(entry.client, entry.submit, entry.keys)
        case WorkersLost():
            scheduler.lose_workers()
        case Restricted():
            scheduler.restrict(None if entry.keys is None else frozenset(entry.keys))
        case WeightsSet():
            scheduler.set_weights(entry.version, recomputes=entry.recomputes)
        case Committed():
            scheduler.commit(entry.result)
        case LoadFinished() | FilesChanged() | Drafted():
            _repeat_hook(scheduler, entry)
        case Opened() | Planned():
            raise ProtocolError(f"a recording has no {type(entry).__name__} here")
        case _:
            assert_never(entry)


def _repeat_hook(scheduler: Scheduler, entry: LoadFinished | FilesChanged | Drafted) -> None:
    match entry:
        case LoadFinished():
            scheduler.finish_load(entry.number, entry.missing, entry.elapsed_s, entry.missing_states)
        case FilesChanged():
            scheduler.change_files(entry.added, entry.removed)
        case Drafted():
            requests = [(scheduler.requests[client, name], token_ids) for client, name, token_ids in entry.draft_tokens]
            scheduler.draft([(each, token_ids) for each, token_ids in requests if isinstance(each, Request)])
