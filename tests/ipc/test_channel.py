"""Sockets: broadcast without loss, bounded queues, malformed frames, lost peers."""

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from subscribers import wait_for_subscribers

from octavo.protocol import PROTOCOL_VERSION
from octavo.protocol.channel import (
    HIGH_WATER_MARK,
    FrontendRouter,
    PeerLost,
    Publisher,
    ResultPull,
    ResultPush,
    Subscriber,
)
from octavo.protocol.codec import event_codec, request_codec, worker_command_codec, worker_reply_codec
from octavo.protocol.errors import ProtocolError, StartupError
from octavo.protocol.events import EngineDying
from octavo.protocol.malformed import Malformed
from octavo.protocol.requests import Abort
from octavo.protocol.steps import Acknowledged, Profile, Stop

TIMEOUT_S = 10.0


class Opened:
    """Everything a test opens, closed in the end; a socket left to the garbage collector is a warning."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self._things: list = []

    def __call__(self, kind: type, address: str):
        thing = kind(self.context, address)
        self._things.append(thing)
        return thing

    def socket(self, kind: int) -> zmq.Socket:
        socket = self.context.socket(kind)
        self._things.append(socket)
        return socket

    def close(self) -> None:
        for thing in self._things:
            thing.close()
        self.context.destroy(linger=0)


@pytest.fixture
def opened() -> Iterator[Opened]:
    opened = Opened()
    yield opened
    opened.close()


def receive_requests(router: FrontendRouter, count: int) -> list:
    received: list = []
    while len(received) < count:
        assert router.socket.poll(int(1000 * TIMEOUT_S)), "timed out"
        received += router.receive()
    return received


def test_every_worker_receives_every_command(opened: Opened, tmp_path: Path) -> None:
    publisher = opened(Publisher, f"ipc://{tmp_path}/plan")
    workers = [opened(Subscriber, publisher.address) for _ in range(3)]
    wait_for_subscribers(publisher, 3, TIMEOUT_S)
    for sequence in range(500):
        publisher.send(Profile(sequence, None))
    publisher.send(Stop(500))
    for worker in workers:
        commands = [worker.receive(TIMEOUT_S) for _ in range(501)]
        assert [command.sequence for command in commands] == list(range(501))
        assert isinstance(commands[-1], Stop)


def test_workers_that_leave_are_not_counted_as_subscribers(opened: Opened, tmp_path: Path) -> None:
    publisher = opened(Publisher, f"ipc://{tmp_path}/plan")
    assert publisher.take_subscriptions() == 0
    worker = opened(Subscriber, publisher.address)
    wait_for_subscribers(publisher, 1, TIMEOUT_S)
    worker.close()
    assert publisher.socket.poll(int(1000 * TIMEOUT_S)), "the end of the subscription does not come"
    assert publisher.take_subscriptions() == 0


def test_a_gap_in_the_broadcast_is_an_error(opened: Opened, tmp_path: Path) -> None:
    publisher = opened.socket(zmq.PUB)
    publisher.bind(f"ipc://{tmp_path}/plan")
    worker = opened(Subscriber, f"ipc://{tmp_path}/plan")
    frame = worker_command_codec().encode(Stop(3))
    while not worker.socket.poll(20):
        publisher.send(frame)
    with pytest.raises(ProtocolError, match="command 0 was lost"):
        worker.receive(TIMEOUT_S)


def test_a_command_out_of_order_is_never_sent(opened: Opened, tmp_path: Path) -> None:
    publisher = opened(Publisher, f"ipc://{tmp_path}/plan")
    with pytest.raises(ProtocolError):
        publisher.send(Stop(1))


def test_answers_arrive(opened: Opened, tmp_path: Path) -> None:
    pull = opened(ResultPull, f"ipc://{tmp_path}/result")
    push = opened(ResultPush, pull.address)
    assert pull.receive(timeout_s=0) is None
    push.send(Acknowledged(4, 1))
    assert pull.receive(TIMEOUT_S) == Acknowledged(4, 1)


def test_a_malformed_frame_is_counted_and_dropped(opened: Opened, tmp_path: Path) -> None:
    router = opened(FrontendRouter, f"ipc://{tmp_path}/core")
    dealer = opened.socket(zmq.DEALER)
    dealer.connect(router.address)
    for frames in ([b""], [b"\x01\xc1"], [b"\x02\x90"], [b"\x01", b"\x90"], [b"\x01" * 9]):
        dealer.send_multipart(frames)
    dealer.send(request_codec().encode(Abort(["a"])))
    *malformed, (_, request) = receive_requests(router, 6)
    assert request == Abort(["a"])
    assert router.malformed_frames == 5
    assert all(message == Malformed(message.fault) for _, message in malformed)


def test_a_flood_of_malformed_frames_leaves_few_lines_in_the_log(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    router = opened(FrontendRouter, f"ipc://{tmp_path}/core")
    dealer = opened.socket(zmq.DEALER)
    dealer.connect(router.address)
    for _ in range(500):
        dealer.send(b"nonsense")
    receive_requests(router, 500)
    assert router.malformed_frames == 500
    assert 0 < len(caplog.records) < 20


def test_a_frontend_of_the_first_version_is_refused_in_its_own_frames(opened: Opened, tmp_path: Path) -> None:
    router = opened(FrontendRouter, f"ipc://{tmp_path}/core")
    dealer = opened.socket(zmq.DEALER)
    dealer.connect(router.address)
    dealer.send_multipart([b"\x01", msgspec.msgpack.encode(["connect", 1, "old"])])
    assert router.socket.poll(int(1000 * TIMEOUT_S))
    assert router.receive() == []
    assert dealer.poll(int(1000 * TIMEOUT_S))
    kind, body = dealer.recv_multipart()
    assert kind == b"\x02"
    tag, message, version = msgspec.msgpack.decode(body)
    assert (tag, version) == ("refused", PROTOCOL_VERSION)
    assert "the frontend version 1" in message


def test_workers_drop_what_is_no_command(opened: Opened, tmp_path: Path) -> None:
    publisher = opened.socket(zmq.PUB)
    publisher.bind(f"ipc://{tmp_path}/plan")
    worker = opened(Subscriber, f"ipc://{tmp_path}/plan")
    while not worker.socket.poll(20):
        publisher.send(b"nonsense")
    publisher.send_multipart([b"\x03", b"\x90"])
    publisher.send(worker_command_codec().encode(Stop(0)))
    assert worker.receive(TIMEOUT_S) == Stop(0)
    assert worker.malformed_frames >= 2


def test_the_core_drops_what_is_no_answer(opened: Opened, tmp_path: Path) -> None:
    pull = opened(ResultPull, f"ipc://{tmp_path}/result")
    push = opened.socket(zmq.PUSH)
    push.connect(pull.address)
    for frames in ([b""], [b"\x04\xc1"], [b"\x04", b"\x90"], [b"\x01" * 9]):
        push.send_multipart(frames)
    push.send(worker_reply_codec().encode(Acknowledged(4, 1)))
    assert pull.receive(TIMEOUT_S) == Acknowledged(4, 1)
    assert pull.malformed_frames == 4
    assert pull.receive(timeout_s=0) is None


def test_answers_reach_the_frontend_that_asked(opened: Opened, tmp_path: Path) -> None:
    router = opened(FrontendRouter, f"ipc://{tmp_path}/core")
    dealers = [opened.socket(zmq.DEALER) for _ in range(3)]
    for number, dealer in enumerate(dealers):
        dealer.connect(router.address)
        dealer.send(request_codec().encode(Abort([str(number)])))
    for peer, request in receive_requests(router, 3):
        assert router.send(peer, EngineDying(request.request_ids[0]))
    for number, dealer in enumerate(dealers):
        assert dealer.poll(int(1000 * TIMEOUT_S))
        assert event_codec().decode(dealer.recv()) == EngineDying(str(number))


def test_a_lost_frontend_is_noticed(opened: Opened, tmp_path: Path) -> None:
    router = opened(FrontendRouter, f"ipc://{tmp_path}/core")
    dealer = opened.socket(zmq.DEALER)
    dealer.connect(router.address)
    dealer.send(request_codec().encode(Abort([])))
    ((peer, _),) = receive_requests(router, 1)
    dealer.close(linger=0)
    with pytest.raises(PeerLost):
        for _ in range(1000):
            router.send(peer, EngineDying(""))
            router.socket.poll(5)


def test_a_frontend_that_does_not_read_is_refused_in_the_end(opened: Opened, tmp_path: Path) -> None:
    router = opened(FrontendRouter, f"ipc://{tmp_path}/core")
    dealer = opened.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.connect(router.address)
    dealer.send(request_codec().encode(Abort([])))
    ((peer, _),) = receive_requests(router, 1)
    event = EngineDying("x" * 10_000)
    sent = 0
    while router.send(peer, event):
        sent += 1
        assert sent < 10 * HIGH_WATER_MARK, "the queue is not bounded"
    assert sent >= 1


def test_a_living_engine_keeps_its_address(opened: Opened, tmp_path: Path) -> None:
    first = opened(FrontendRouter, f"ipc://{tmp_path}/core")
    with pytest.raises(StartupError, match="another engine listens"):
        opened(FrontendRouter, first.address)
    dealer = opened.socket(zmq.DEALER)
    dealer.connect(first.address)
    dealer.send(request_codec().encode(Abort(["a"])))
    assert len(receive_requests(first, 1)) == 1


def test_a_dead_engine_leaves_its_address_free(opened: Opened, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "core"))
    assert (tmp_path / "core").exists()
    assert opened(FrontendRouter, f"ipc://{tmp_path}/core")


def test_an_impossible_address_is_a_clear_error(opened: Opened) -> None:
    with pytest.raises(StartupError, match="cannot bind ipc:///nowhere/at/all"):
        opened(FrontendRouter, "ipc:///nowhere/at/all")


def test_sockets_are_private(opened: Opened, tmp_path: Path) -> None:
    opened(FrontendRouter, f"ipc://{tmp_path}/core")
    assert (tmp_path / "core").stat().st_mode & 0o077 == 0
