"""`TransferServer`: a thread that sends this engine's blocks to other engines."""

import logging
import os
import threading
import time
import zlib

import msgspec
import zmq

from octavo.core_proc.transfer.offers import Offers
from octavo.core_proc.transfer.sockets import PART_BYTES
from octavo.protocol.channel import bind_for_group
from octavo.protocol.curve import EngineKeys
from octavo.protocol.errors import StartupError
from octavo.protocol.kv_transfer import Answer, Ask, Part, Question, Read, Release, rank_file
from octavo.protocol.log import LimitedLog

logger = logging.getLogger(__name__)

_WAKE = "inproc://kv-offers"
_RETRY_MS = 100


class TransferServer:
    """Responds to other engines. The step loop never waits for it.

    Args:
        context: ZeroMQ context, with an `Authenticator` if there are keys. `term` ends the thread.
        addresses: addresses of the sockets.
        keys: keys of the addresses that other machines can reach. None if there are none.
        offers: blocks that other engines may take.
        is_replacement: whether an earlier core may still use the addresses. They are bound once it has exited.

    Raises:
        ConfigError: other machines can reach an address, but there are no keys.
        StartupError: an address cannot be bound.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        addresses: list[str],
        keys: EngineKeys | None,
        offers: Offers,
        *,
        is_replacement: bool,
    ) -> None:
        self._context = context
        self._keys = keys
        self._offers = offers
        self._decoder: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
        self._encode = msgspec.msgpack.Encoder().encode
        self._log = LimitedLog(logger)
        self._asking: dict[str, list[tuple[zmq.Socket[bytes], bytes, Ask]]] = {}
        """Requests for offers that are being written, by transfer id."""
        self._poller = zmq.Poller()
        self._wake, self._woken = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        self._sockets: list[zmq.Socket[bytes]] = [self._woken]
        self._wake.bind(_WAKE)
        self._woken.connect(_WAKE)
        self._poller.register(self._woken, zmq.POLLIN)
        self._unbound: list[str] = []
        self.bound: list[str] = []
        """The addresses on which the server listens."""
        try:
            for address in addresses:
                self._bind(address, is_replacement=is_replacement)
        except BaseException:
            self.close()
            self._close_sockets()
            raise
        threading.Thread(target=self._run, name="KV transfers", daemon=True).start()

    @property
    def port(self) -> int:
        """The port for engines on other machines; 0 if there is none."""
        remote = [address for address in self.bound if address.startswith("tcp://")]
        return int(remote[0].rpartition(":")[2]) if remote else 0

    def wake(self) -> None:
        """Reply to requests for offers that were written or dropped meanwhile."""
        self._wake.send(b"")

    def close(self) -> None:
        """Close the step loop's end. The thread ends with the context."""
        self._wake.close(linger=0)

    def _bind(self, address: str, *, is_replacement: bool) -> None:
        socket = self._context.socket(zmq.ROUTER)
        socket.sndhwm = 0  # no limit: each peer requests only a few parts at a time
        socket.linger = 0
        try:
            self.bound.append(bind_for_group(socket, address, self._keys))
        except StartupError:
            socket.close(linger=0)
            if not is_replacement:
                raise
            self._unbound.append(address)
            return
        self._sockets.append(socket)
        self._poller.register(socket, zmq.POLLIN)

    def _run(self) -> None:
        """Serve requests until the context is terminated."""
        try:
            while True:
                ready = self._poller.poll(self._timeout_ms())
                unbound, self._unbound = self._unbound, []
                for address in unbound:
                    self._bind(address, is_replacement=True)
                self._offers.expire()
                for socket, _ in ready:
                    if socket is self._woken:
                        self._woken.recv()
                    else:
                        client, *frames = socket.recv_multipart()
                        self._handle(socket, client, frames[-1] if frames else b"")
                self._answer_waiting()
        except zmq.ContextTerminated:
            self._close_sockets()

    def _timeout_ms(self) -> int | None:
        deadline_s = self._offers.next_deadline_s
        due_ms = None if deadline_s is None else max(0, int(1000 * (deadline_s - time.monotonic())) + 1)
        return min(due_ms or _RETRY_MS, _RETRY_MS) if self._unbound else due_ms

    def _close_sockets(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)

    def _handle(self, socket: "zmq.Socket[bytes]", client: bytes, body: bytes) -> None:
        try:
            question = self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._log.warning("dropped a malformed message of another engine: %s", error)
            return
        match question:
            case Ask():
                self._answer(socket, client, question)
            case Read():
                socket.send_multipart((client, *self._part(question)))
            case Release(transfer_id):
                self._offers.drop(transfer_id)

    def _answer(self, socket: "zmq.Socket[bytes]", client: bytes, ask: Ask) -> None:
        offer = self._offers.find(ask.transfer_id)
        if offer is not None and offer.fingerprint == ask.fingerprint and not offer.is_written:
            self._asking.setdefault(ask.transfer_id, []).append((socket, client, ask))
            return
        if offer is None:
            answer = Answer("the blocks are gone: fetched by another engine, or expired")
        elif offer.fingerprint != ask.fingerprint:
            answer = Answer("the blocks have other weights, data types or sharding than this engine's")
        else:
            files = [rank_file(offer.path, rank) for rank in range(self._offers.num_ranks)]
            try:
                answer = Answer("", offer.keys, offer.path, [os.stat(file).st_size for file in files])
            except OSError as error:
                answer = Answer(str(error))
        socket.send_multipart((client, self._encode(answer)))

    def _answer_waiting(self) -> None:
        for transfer_id in list(self._asking):
            offer = self._offers.find(transfer_id)
            if offer is None or offer.is_written:
                for socket, client, ask in self._asking.pop(transfer_id):
                    self._answer(socket, client, ask)

    def _part(self, read: Read) -> list[bytes]:
        """Return the frames of one part of a file."""
        offer = self._offers.find(read.transfer_id)
        if offer is None or not 0 <= read.rank < self._offers.num_ranks or not 0 < read.num_bytes <= PART_BYTES:
            return [self._encode(Part("there is no such part"))]
        try:
            with open(rank_file(offer.path, read.rank), "rb") as file:
                file.seek(read.offset)
                data = file.read(read.num_bytes)
        except (OSError, ValueError) as error:
            return [self._encode(Part(str(error)))]
        return [self._encode(Part("", zlib.crc32(data))), data]
