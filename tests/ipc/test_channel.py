"""Sockets: broadcast without loss, bounded queues, malformed frames, lost peers."""

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from subscribers import wait_for_subscribers
from waiting import wait_until

from octavo.protocol import PROTOCOL_VERSION
from octavo.protocol.buffers import Buffer
from octavo.protocol.channel import (
    HIGH_WATER_MARK,
    MAX_RECEIVED_AT_ONCE,
    MAX_RECEIVED_BYTES_AT_ONCE,
    FrontendRouter,
    PeerLost,
    Publisher,
    ResultPull,
    ResultPush,
    Subscriber,
    receive_message,
    send_message,
)
from octavo.protocol.codec import (
    MAX_BUFFERS,
    MIN_BUFFER_BYTES,
    event_codec,
    request_codec,
    worker_command_codec,
    worker_reply_codec,
)
from octavo.protocol.errors import ProtocolError, StartupError
from octavo.protocol.events import EngineDying, Events, Finished, FinishReason, PooledOutput, reject_version
from octavo.protocol.ids import pack_ids
from octavo.protocol.malformed import Malformed
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Abort, Connect, Submit
from octavo.protocol.steps import StepResult, TokenMasks
from octavo.protocol.worker_commands import Acknowledged, Profile, StopWorker

TIMEOUT_S = 60.0


class Opened:
    """Sockets that a test opens, closed at its end: the garbage collector would warn of an open socket."""

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
    publisher.send(StopWorker(500))
    for worker in workers:
        commands = [worker.receive(TIMEOUT_S) for _ in range(501)]
        assert [command.sequence for command in commands] == list(range(501))
        assert isinstance(commands[-1], StopWorker)


def test_a_worker_that_connects_again_counts_once(opened: Opened, tmp_path: Path) -> None:
    publisher = opened(Publisher, f"ipc://{tmp_path}/plan")
    assert publisher.take_subscriptions() == 0
    workers = [opened(Subscriber, publisher.address) for _ in range(2)]
    wait_for_subscribers(publisher, 2, TIMEOUT_S)
    workers[0].close()
    assert publisher.socket.poll(int(1000 * TIMEOUT_S)), "the end of the subscription does not come"
    assert publisher.take_subscriptions() == -1
    opened(Subscriber, publisher.address)
    wait_for_subscribers(publisher, 1, TIMEOUT_S)


def test_a_gap_in_the_broadcast_is_an_error(opened: Opened, tmp_path: Path) -> None:
    publisher = opened.socket(zmq.PUB)
    publisher.bind(f"ipc://{tmp_path}/plan")
    worker = opened(Subscriber, f"ipc://{tmp_path}/plan")
    frame = worker_command_codec().encode(StopWorker(3))
    wait_until(lambda: publisher.send_multipart(frame) or worker.socket.poll(20), interval_s=0)
    with pytest.raises(ProtocolError, match="command 0 was lost"):
        worker.receive(TIMEOUT_S)


def test_a_command_out_of_order_is_never_sent(opened: Opened, tmp_path: Path) -> None:
    publisher = opened(Publisher, f"ipc://{tmp_path}/plan")
    with pytest.raises(ProtocolError):
        publisher.send(StopWorker(1))


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
    dealer.send_multipart(request_codec().encode(Abort(["a"])))
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


def test_large_buffers_cross_every_socket_beside_the_body(opened: Opened, tmp_path: Path) -> None:
    token_ids = pack_ids(range(MIN_BUFFER_BYTES))
    router = opened(FrontendRouter, f"ipc://{tmp_path}/core")
    dealer = opened.socket(zmq.DEALER)
    dealer.connect(router.address)
    submit = Submit("r", token_ids, SamplingSpec(max_tokens=1, seed=0), resume_output_token_ids=token_ids)
    frames = request_codec().encode(submit)
    assert [len(frame) for frame in frames[1:]] == [4 * MIN_BUFFER_BYTES] * 2 and len(frames[0]) < 200
    send_message(dealer, frames)
    ((peer, request),) = receive_requests(router, 1)
    assert request == submit
    pooled = PooledOutput(Buffer(bytes(MIN_BUFFER_BYTES)), (4, MIN_BUFFER_BYTES // 16), "float32")
    event = Events(1, [Finished("r", FinishReason.STOP, result=pooled)])
    assert router.send(peer, event)
    assert dealer.poll(int(1000 * TIMEOUT_S))
    received = receive_message(dealer)
    assert isinstance(received[1], memoryview), "it was not copied out of the message of zmq"
    assert event_codec().decode(*received) == event

    publisher = opened(Publisher, f"ipc://{tmp_path}/plan")
    workers = [opened(Subscriber, publisher.address) for _ in range(2)]
    wait_for_subscribers(publisher, 2, TIMEOUT_S)
    masks = [(slot, slot % 2, bytes([slot]) * 2**15) for slot in range(4)]
    publisher.send(TokenMasks.pack(0, masks))
    publisher.send(StopWorker(1))
    for worker in workers:
        command = worker.receive(TIMEOUT_S)
        assert isinstance(command, TokenMasks) and command.unpack() == masks
        assert worker.receive(TIMEOUT_S) == StopWorker(1)

    pull = opened(ResultPull, f"ipc://{tmp_path}/result")
    push = opened(ResultPush, pull.address)
    result = StepResult(0, token_ids, [], [], counts=[1] * len(token_ids))
    push.send(result)
    push.send(Acknowledged(1, 0))
    assert pull.receive(TIMEOUT_S) == result
    assert pull.receive(TIMEOUT_S) == Acknowledged(1, 0)


def test_buffers_that_do_not_fit_their_body_harm_nobody_else(opened: Opened, tmp_path: Path) -> None:
    router = opened(FrontendRouter, f"ipc://{tmp_path}/core")
    dealer = opened.socket(zmq.DEALER)
    dealer.connect(router.address)
    spec = SamplingSpec(max_tokens=1, seed=0)
    body, buffer = request_codec().encode(Submit("large", pack_ids(range(MIN_BUFFER_BYTES)), spec))
    (short,) = request_codec().encode(Submit("short", pack_ids([1, 2]), spec))
    wrong = {
        "0 of 0 were used": [body],
        "uses 1 of its 2 buffers": [body, buffer, buffer],
        "4 bytes each, got 5": [body, b"12345"],
        "uses 0 of its 1 buffers": [short, buffer],
        "buffer 1 where 0 of 1": [body.replace(b"large\x00", b"large\x01"), buffer],
        "more than 256 buffers": [body, *[b""] * (MAX_BUFFERS + 50)],
    }
    for frames in wrong.values():
        dealer.send_multipart(frames)
    dealer.send(short)
    *malformed, (_, request) = receive_requests(router, len(wrong) + 1)
    assert request.request_id == "short"
    assert router.malformed_frames == len(wrong)
    assert [message.request_id for _, message in malformed] == ["large", "large", "large", "short", "large", "large"]
    for (_, message), fault in zip(malformed, wrong, strict=True):
        assert fault in message.fault


def test_a_frontend_of_the_second_version_is_rejected_in_a_frame_it_can_read(opened: Opened, tmp_path: Path) -> None:
    router = opened(FrontendRouter, f"ipc://{tmp_path}/core")
    dealer = opened.socket(zmq.DEALER)
    dealer.connect(router.address)
    dealer.send(b"\x01" + msgspec.msgpack.encode(["connect", 2, "old", b"id"]))
    ((peer, request),) = receive_requests(router, 1)
    assert request == Connect(2, "old", b"id")
    assert router.send(peer, reject_version(request.version))
    assert dealer.poll(int(1000 * TIMEOUT_S))
    (frame,) = dealer.recv_multipart()
    assert frame[:1] == b"\x02"
    assert msgspec.msgpack.decode(frame[1:]) == ["refused", reject_version(2).message, PROTOCOL_VERSION]


def test_a_frontend_of_the_first_version_is_rejected_in_its_own_frames(opened: Opened, tmp_path: Path) -> None:
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
    wait_until(lambda: publisher.send(b"nonsense") or worker.socket.poll(20), interval_s=0)
    publisher.send_multipart([b"\x03", b"\x90"])
    publisher.send_multipart(worker_command_codec().encode(StopWorker(0)))
    assert worker.receive(TIMEOUT_S) == StopWorker(0)
    assert worker.malformed_frames >= 2


def test_the_core_drops_what_is_no_answer(opened: Opened, tmp_path: Path) -> None:
    pull = opened(ResultPull, f"ipc://{tmp_path}/result")
    push = opened.socket(zmq.PUSH)
    push.connect(pull.address)
    for frames in ([b""], [b"\x04\xc1"], [b"\x04", b"\x90"], [b"\x01" * 9]):
        push.send_multipart(frames)
    push.send_multipart(worker_reply_codec().encode(Acknowledged(4, 1)))
    assert pull.receive(TIMEOUT_S) == Acknowledged(4, 1)
    assert pull.malformed_frames == 4
    assert pull.receive(timeout_s=0) is None


def test_answers_reach_the_frontend_that_asked(opened: Opened, tmp_path: Path) -> None:
    router = opened(FrontendRouter, f"ipc://{tmp_path}/core")
    dealers = [opened.socket(zmq.DEALER) for _ in range(3)]
    for number, dealer in enumerate(dealers):
        dealer.connect(router.address)
        dealer.send_multipart(request_codec().encode(Abort([str(number)])))
    for peer, request in receive_requests(router, 3):
        assert router.send(peer, EngineDying(request.request_ids[0]))
    for number, dealer in enumerate(dealers):
        assert dealer.poll(int(1000 * TIMEOUT_S))
        assert event_codec().decode(dealer.recv()) == EngineDying(str(number))


def test_a_lost_frontend_is_noticed(opened: Opened, tmp_path: Path) -> None:
    router = opened(FrontendRouter, f"ipc://{tmp_path}/core")
    dealer = opened.socket(zmq.DEALER)
    dealer.connect(router.address)
    dealer.send_multipart(request_codec().encode(Abort([])))
    ((peer, _),) = receive_requests(router, 1)
    dealer.close(linger=0)
    with pytest.raises(PeerLost):
        for _ in range(1000):
            router.send(peer, EngineDying(""))
            router.socket.poll(5)


def test_a_frontend_that_does_not_read_is_rejected_in_the_end(opened: Opened, tmp_path: Path) -> None:
    router = opened(FrontendRouter, f"ipc://{tmp_path}/core")
    dealer = opened.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.connect(router.address)
    dealer.send_multipart(request_codec().encode(Abort([])))
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
    dealer.send_multipart(request_codec().encode(Abort(["a"])))
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


@pytest.mark.parametrize(
    ("num_bytes", "num_at_once"), [(1, MAX_RECEIVED_AT_ONCE), (MAX_RECEIVED_BYTES_AT_ONCE // 2, 2)]
)
def test_a_flood_is_received_in_batches(opened: Opened, tmp_path: Path, num_bytes: int, num_at_once: int):
    router = opened(FrontendRouter, f"ipc://{tmp_path}/core")
    client = opened.socket(zmq.DEALER)
    client.connect(router.address)
    for _ in range(num_at_once + 1):
        client.send_multipart(request_codec().encode(Abort(["x" * num_bytes])))
    parts = []
    while sum(parts) <= num_at_once:
        assert router.socket.poll(1000 * TIMEOUT_S), "what is left wakes the loop again"
        parts.append(len(router.receive()))
    assert max(parts) <= num_at_once
