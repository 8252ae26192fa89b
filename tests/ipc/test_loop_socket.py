"""A zmq socket on an event loop: no message is lost or delayed, even if a peer is slow."""

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from socket import socketpair

import pytest
import uvloop
import zmq
from waiting import TIMEOUT_S, join, until

from octavo.frontend.loop_socket import MAX_RECEIVED_AT_ONCE, MAX_SENT_AT_ONCE, LoopSocket

MANY = 20 * MAX_RECEIVED_AT_ONCE
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


class Pair:
    """A socket under test and the plain one it is connected to, with queues of a few messages."""

    def __init__(self, context: zmq.Context, address: str) -> None:
        self.plain = context.socket(zmq.PAIR)
        self.own = context.socket(zmq.PAIR)
        for socket in (self.plain, self.own):
            socket.setsockopt(zmq.SNDHWM, 4)
            socket.setsockopt(zmq.RCVHWM, 4)
            socket.setsockopt(zmq.RCVTIMEO, 20_000)
            socket.setsockopt(zmq.SNDTIMEO, 20_000)
            socket.setsockopt(zmq.LINGER, 0)
        self.plain.bind(address)
        self.own.connect(address)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    context = zmq.Context()
    yield Pair(context, f"ipc://{tmp_path}/pair")
    context.destroy(linger=0)


def play(make_loop: Callable[[], asyncio.AbstractEventLoop], scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(scenario(), 30)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main())


def no_error(error: Exception) -> None:
    raise AssertionError from error


@pytest.mark.parametrize("make_loop", LOOPS)
def test_a_flood_is_received_in_order(pair: Pair, make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    received: list[int] = []
    complete = asyncio.Event()

    def on_message(frames: list[bytes]) -> None:
        received.append(int(frames[0]))
        if len(received) == MANY:
            complete.set()

    def flood() -> None:
        for number in range(MANY):
            pair.plain.send(b"%d" % number)

    async def scenario() -> None:
        socket = LoopSocket(pair.own, on_message, no_error)
        sender = threading.Thread(target=flood)
        sender.start()
        await asyncio.wait_for(complete.wait(), TIMEOUT_S)
        join(sender)
        socket.close()

    play(make_loop, scenario)
    assert received == list(range(MANY))


@pytest.mark.parametrize("make_loop", LOOPS)
def test_a_peer_that_reads_late_gets_everything(pair: Pair, make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    received: list[list[bytes]] = []

    def read() -> None:
        received.extend(pair.plain.recv_multipart() for _ in range(MANY))

    async def scenario() -> None:
        socket = LoopSocket(pair.own, lambda frames: None, no_error)
        for number in range(MANY):
            socket.send([b"%d" % number, b"body" * 1000])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(socket.drain(), 0.1)
        reader = threading.Thread(target=read)
        reader.start()
        await asyncio.wait_for(socket.drain(), TIMEOUT_S)
        await asyncio.to_thread(join, reader)
        socket.close()

    play(make_loop, scenario)
    assert [int(frames[0]) for frames in received] == list(range(MANY))


@pytest.mark.parametrize("make_loop", LOOPS)
def test_floods_in_both_directions_do_not_stop_one_another(
    pair: Pair, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    num_received = 0
    complete = asyncio.Event()

    def on_message(frames: list[bytes]) -> None:
        nonlocal num_received
        num_received += 1
        socket.send(frames)  # an echo: each direction waits for room in the other's queue
        if num_received == MANY:
            complete.set()

    def talk() -> None:
        num_sent = num_echoed = 0
        while num_echoed < MANY:
            events = pair.plain.poll(20_000, zmq.POLLIN | (zmq.POLLOUT if num_sent < MANY else 0))
            if events & zmq.POLLIN:
                assert int(pair.plain.recv()) == num_echoed
                num_echoed += 1
            if events & zmq.POLLOUT:
                pair.plain.send(b"%d" % num_sent)
                num_sent += 1
            assert events, "nothing moves any more"

    async def scenario() -> None:
        nonlocal socket
        socket = LoopSocket(pair.own, on_message, no_error)
        await asyncio.to_thread(talk)
        await asyncio.wait_for(complete.wait(), TIMEOUT_S)
        socket.close()

    socket: LoopSocket
    play(make_loop, scenario)


class Echo:
    """A zmq socket that receives what it sends, and counts the messages that it takes in each iteration of a loop."""

    closed = False

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._messages: list[bytes] = []
        self.turn = 0
        self.num_sent: Counter[int] = Counter()
        self._count_turns()

    def _count_turns(self) -> None:
        self.turn += 1
        asyncio.get_running_loop().call_soon(self._count_turns)

    def getsockopt(self, option: int) -> int:
        return {zmq.FD: self._fd, zmq.RCVMORE: 0}.get(option, zmq.POLLOUT)

    def send(self, frame: bytes, flags: int) -> None:
        self.num_sent[self.turn] += 1
        self._messages.append(frame)

    def recv(self, flags: int) -> bytes:
        if not self._messages:
            raise zmq.Again
        return self._messages.pop(0)

    def close(self, linger_ms: int | None) -> None:
        self.closed = True


def test_long_messages_and_many_of_them_take_several_turns_and_stay_in_order() -> None:
    num_slices = 3 * MAX_RECEIVED_AT_ONCE
    handled: list[tuple[int, int]] = []
    num_handled: Counter[int] = Counter()

    def slices(number: int) -> Iterator[None]:
        for index in range(num_slices):
            num_handled[echo.turn] += 1
            handled.append((number, index))
            yield

    def on_message(frames: list[bytes]) -> Iterator[None] | None:
        number = int(frames[0])
        return slices(number) if number < 2 else handled.append((number, 0))

    async def scenario() -> None:
        nonlocal echo
        ours, theirs = socketpair()
        with ours, theirs:
            echo = Echo(ours.fileno())
            socket = LoopSocket(echo, on_message, no_error)
            for number in range(count):
                socket.send([b"%d" % number])
            await asyncio.wait_for(socket.drain(), TIMEOUT_S)
            await until(lambda: len(handled) == len(expected))
            assert not socket.is_behind
            socket.close()

    echo: Echo
    count = 3 * MAX_SENT_AT_ONCE
    expected = [(number, index) for number in range(2) for index in range(num_slices)]
    expected += [(number, 0) for number in range(2, count)]
    play(asyncio.new_event_loop, scenario)
    assert handled == expected
    assert max(num_handled.values()) <= MAX_RECEIVED_AT_ONCE
    assert max(echo.num_sent.values()) == MAX_SENT_AT_ONCE


def test_work_on_a_message_that_fails_is_not_continued(pair: Pair) -> None:
    told: list[Exception] = []
    received: list[bytes] = []

    def on_message(frames: list[bytes]) -> Iterator[None] | None:
        received.append(frames[0])
        return iter(zero_division()) if frames == [b"bad"] else None

    def zero_division() -> Iterator[None]:
        yield
        raise ZeroDivisionError

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        socket = LoopSocket(pair.own, on_message, told.append)
        pair.plain.send(b"bad")
        pair.plain.send(b"good")
        await until(lambda: received == [b"bad", b"good"])
        socket.close()

    play(asyncio.new_event_loop, scenario)
    assert [type(error) for error in told] == [ZeroDivisionError]


class FullSocket:
    """Takes no message; one comes in at the very moment when it is asked whether it has room by now."""

    closed = False

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._arrived: list[bytes] = []
        self._has_been_asked = False

    def getsockopt(self, option: int) -> int:
        if option == zmq.FD:
            return self._fd  # never readable: to ask has swallowed the sign
        if option == zmq.RCVMORE:
            return 0
        if not self._has_been_asked:
            self._has_been_asked = True
            self._arrived.append(b"news")
        return zmq.POLLIN if self._arrived else 0

    def send(self, frame: bytes, flags: int) -> None:
        raise zmq.Again

    def recv(self, flags: int) -> bytes:
        if not self._arrived:
            raise zmq.Again
        return self._arrived.pop()

    def close(self, linger_ms: int | None) -> None:
        self.closed = True


def test_a_message_that_comes_while_nothing_can_be_sent_does_not_lie_there() -> None:
    async def scenario() -> list[bytes]:
        received: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        ours, theirs = socketpair()
        with ours, theirs:
            full = LoopSocket(FullSocket(ours.fileno()), received.set_result, no_error)
            full.send([b"too much"])
            try:
                return await asyncio.wait_for(received, 1)
            finally:
                full.close()

    assert asyncio.run(scenario()) == [b"news"]


def test_an_error_of_the_receiver_is_told_and_reaches_the_loop(pair: Pair) -> None:
    told: list[Exception] = []
    handled: list[dict] = []

    def on_message(frames: list[bytes]) -> None:
        raise ZeroDivisionError(frames[0])

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: handled.append(context))
        socket = LoopSocket(pair.own, on_message, told.append)
        pair.plain.send(b"x")
        await until(lambda: handled)
        socket.close()

    play(asyncio.new_event_loop, scenario)
    assert [type(error) for error in told] == [ZeroDivisionError]
    assert handled[0]["exception"] is told[0]


def test_closing_twice_and_after_the_context_is_harmless(pair: Pair) -> None:
    async def scenario() -> None:
        socket = LoopSocket(pair.own, lambda frames: None, no_error)
        socket.send([b"x"])
        pair.own.close(linger=0)
        await asyncio.sleep(0.01)
        socket.close()
        socket.close()
        assert pair.own.closed

    play(asyncio.new_event_loop, scenario)
