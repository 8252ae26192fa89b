"""`Puller`: threads that fetch blocks of other engines into local files."""

import contextlib
import itertools
import logging
import os
import queue
import threading
import time
import zlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from octavo.core_proc.transfer.sockets import GONE_EVENTS, PART_BYTES, address_of
from octavo.protocol.curve import ClientKeys, prepare_connection
from octavo.protocol.errors import ConfigError
from octavo.protocol.kv_transfer import Answer, Ask, KVTransfer, Part, Question, Read, Release, rank_file

logger = logging.getLogger(__name__)

NUM_THREADS = 4
SILENCE_S = 2.0
"""Seconds for which an unresponsive engine is not contacted again."""
LINGER_MS = 1000
"""Linger time for the last message of a connection."""
READ_AHEAD = 4
"""Number of parts requested ahead."""

_Reply = TypeVar("_Reply", Answer, Part)


class PullFailed(Exception):
    """The blocks cannot be fetched. The message says why."""


class PeerSilent(PullFailed):
    """The engine that has the blocks does not respond."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """The outcome of a pull."""

    transfer_id: str
    fault: str
    """Why there are no blocks. Empty on success."""
    keys: list[bytes]
    """Key of each row of the files."""
    path: str
    """Path of the files, without the ranks. The caller removes them."""
    fingerprint: str
    """The fingerprint with which they were requested."""


class Puller:
    """Fetches blocks. Call all methods from one thread.

    Args:
        context: ZeroMQ context. `term` ends the threads.
        directory: directory of the sockets of engines on this machine.
        folder: folder for the files, in shared memory.
        num_ranks: files of each pull.
        keys: keys for engines on other machines. None if there are none.
        timeout_s: an engine counts as dead if it does not respond for this many seconds.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        directory: Path,
        folder: Path,
        num_ranks: int,
        keys: ClientKeys | None,
        timeout_s: float,
    ) -> None:
        self._context = context
        self._directory = directory
        self._folder = folder
        self._num_ranks = num_ranks
        self._keys = keys
        self._timeout_s = timeout_s
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when `take_done` has results."""
        self._jobs: queue.SimpleQueue[tuple[KVTransfer, str] | None] = queue.SimpleQueue()
        self._done: deque[Pulled] = deque()
        self._threads: list[threading.Thread] = []
        self._counter = itertools.count()
        self._silent: dict[str, float] = {}
        """Until when unresponsive engines are not contacted, by address, so that other pulls do not queue behind
        them."""

    def start(self, transfer: KVTransfer, fingerprint: str) -> None:
        """Start to fetch blocks."""
        self._jobs.put((transfer, fingerprint))
        if len(self._threads) < NUM_THREADS:
            thread = threading.Thread(target=self._work, name="KV pulls", daemon=True)
            self._threads.append(thread)
            thread.start()

    def take_done(self) -> list[Pulled]:
        """Return the pulls that have ended since the last call. Never blocks."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def remove_files(self, path: str) -> None:
        """Remove the files of a pull, as far as they exist."""
        for rank in range(self._num_ranks):
            with contextlib.suppress(FileNotFoundError):
                Path(rank_file(path, rank)).unlink()

    def close(self) -> None:
        """Join the threads. The context must have been terminated."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self.wake_fd)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            transfer, fingerprint = job
            path = str(self._folder / f"in-{next(self._counter)}-{transfer.transfer_id}")
            keys: list[bytes] = []
            fault = ""
            try:
                keys = self._pull(transfer, fingerprint, path)
            except (PullFailed, OSError, ConfigError) as error:
                fault = str(error)
            except zmq.ZMQError as error:  # also if the context was terminated
                fault = error.strerror or str(error)
            if fault:
                self.remove_files(path)
            self._done.append(Pulled(transfer.transfer_id, fault, keys, path, fingerprint))
            os.eventfd_write(self.wake_fd, 1)

    def _pull(self, transfer: KVTransfer, fingerprint: str, path: str) -> list[bytes]:
        address = address_of(transfer, self._directory)
        if time.monotonic() < self._silent.get(address, 0.0):
            raise PullFailed("the engine that has them was silent lately")
        with _Connection(self._context, address, self._keys, self._timeout_s) as peer:
            peer.send(Ask(transfer.transfer_id, fingerprint))
            try:
                answer, _ = peer.receive(Answer)
            except PeerSilent:
                self._silent = {address: time.monotonic() + SILENCE_S}  # one is enough, for bursts
                raise
            self._silent.pop(address, None)
            if answer.fault:
                raise PullFailed(answer.fault)
            if len(answer.sizes) != self._num_ranks:
                raise PullFailed(f"{len(answer.sizes)} workers have parts of them, and here are {self._num_ranks}")
            for rank, size in enumerate(answer.sizes):
                target = rank_file(path, rank)
                if not (not transfer.host and _link(rank_file(answer.path, rank), target, size)):
                    _fetch(peer, transfer.transfer_id, rank, size, target)
            peer.send(Release(transfer.transfer_id))
            return answer.keys


class _Connection:
    """A connection to another engine, for one pull."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: ClientKeys | None, timeout_s: float
    ) -> None:
        self._timeout_ms = int(1000 * timeout_s)
        self._encode = msgspec.msgpack.Encoder().encode
        self._socket = context.socket(zmq.DEALER)
        self._monitor = self._socket.get_monitor_socket(GONE_EVENTS)
        try:
            prepare_connection(self._socket, address, keys)
            self._socket.connect(address)
        except BaseException as error:
            self.__exit__(error)
            raise

    def __enter__(self) -> "_Connection":
        return self

    def __exit__(self, error: object = None, *_: object) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the context was terminated
            self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0 if error else LINGER_MS)

    def send(self, question: Question) -> None:
        """Send a request."""
        self._socket.send(self._encode(question), zmq.DONTWAIT)

    def receive(self, kind: type[_Reply]) -> tuple[_Reply, bytes]:
        """Return the next reply, and the frame after it.

        Blocks until: the reply has arrived.

        Raises:
            PullFailed: the engine has died, does not respond, or sends an unexpected reply.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        ready = dict(poller.poll(self._timeout_ms))
        if not ready:
            raise PeerSilent("the engine that has them is silent")
        if self._socket not in ready:
            raise PullFailed("the engine that has them is gone")
        body, *data = self._socket.recv_multipart()
        try:
            return msgspec.msgpack.decode(body, type=kind), b"".join(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise PullFailed(f"the engine that has them sent something else: {error}") from error


def _link(source: str, target: str, size: int) -> bool:
    """Hard-link a file of an engine on this machine. Return False if that is impossible."""
    try:
        os.link(source, target)
        if os.stat(target).st_size == size:
            return True
        os.unlink(target)
    except OSError:  # another user's file, or another file system
        pass
    return False


def _fetch(peer: _Connection, transfer_id: str, rank: int, size: int, target: str) -> None:
    """Copy a file through the connection and verify its checksums."""
    offsets = range(0, size, PART_BYTES)
    reads = [Read(transfer_id, rank, offset, min(PART_BYTES, size - offset)) for offset in offsets]
    fd = os.open(target, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        for index in range(len(reads) + READ_AHEAD):
            if index < len(reads):
                peer.send(reads[index])
            if index >= READ_AHEAD and (read := reads[index - READ_AHEAD]):
                part, data = peer.receive(Part)
                if part.fault:
                    raise PullFailed(part.fault)
                if len(data) != read.num_bytes or zlib.crc32(data) != part.checksum:
                    raise PullFailed("a part has arrived damaged")
                view, offset = memoryview(data), read.offset
                while view:
                    num_written = os.pwrite(fd, view, offset)
                    view, offset = view[num_written:], offset + num_written
    finally:
        os.close(fd)
