"""Many callers at once: probes are answered first, and callers above the limit get a 503."""

import asyncio
import gc
import socket
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop
from fake_client import FakeClient
from http_client import application, listening
from waiting import until

from octavo.frontend.http import acceptor, server
from octavo.frontend.http.http_protocol import HttpProtocol
from octavo.frontend.http.throttle import MAX_AT_ONCE, is_probe

POST = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\n"
POST += b'content-length: 17\r\n\r\n{"prompt": "abc"}'
PROBE = b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
KEPT = POST.replace(b"connection: close\r\n", b"")
NUM_CALLERS = 400


def call(path: str, request: bytes) -> socket.socket:
    """Connect and ask without giving the event loop a turn."""
    caller = socket.socket(socket.AF_UNIX)
    caller.connect(path)
    caller.sendall(request)
    caller.setblocking(False)
    return caller


def has_answer(caller: socket.socket) -> bool:
    try:
        return bool(caller.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


async def answer(caller: socket.socket) -> bytes:
    loop = asyncio.get_running_loop()
    parts = [await loop.sock_recv(caller, 65536)]
    while parts[-1]:
        parts.append(await asyncio.wait_for(loop.sock_recv(caller, 65536), 30))
    caller.close()
    return b"".join(parts)


@pytest.mark.parametrize("are_connected", [False, True], ids=["new", "connected"])
def test_a_probe_is_answered_before_a_flood_that_came_first(are_connected: bool) -> None:
    async def main() -> None:
        async with listening(application(FakeClient())) as path:
            flood = [call(path, b"" if are_connected else POST) for _ in range(NUM_CALLERS)]
            if are_connected:
                await asyncio.sleep(0.5)
                for caller in flood:
                    caller.sendall(POST)
            probe = call(path, PROBE)
            health = await answer(probe)
            assert b" 200 OK" in health.splitlines()[0]
            assert sum(map(has_answer, flood)) < NUM_CALLERS / 2
            answers = [await answer(caller) for caller in flood]
            assert all(b" 200 OK" in text.splitlines()[0] for text in answers)

    asyncio.run(main())


def test_a_probe_that_is_accepted_before_it_asks_is_answered_first_too(monkeypatch: pytest.MonkeyPatch) -> None:
    admitted: list[socket.socket] = []
    set_up = acceptor.Acceptor._set_up

    def count(self: acceptor.Acceptor, caller: socket.socket) -> None:
        admitted.append(caller)
        set_up(self, caller)

    monkeypatch.setattr(acceptor.Acceptor, "_set_up", count)

    async def main() -> None:
        async with listening(application(FakeClient())) as path:
            flood = [call(path, POST) for _ in range(NUM_CALLERS)]
            probe = call(path, b"")
            for _ in range(4):  # all connections are accepted, few of them are let in
                await asyncio.sleep(0)
            probe.sendall(PROBE)
            assert b" 200 OK" in (await answer(probe)).splitlines()[0]
            assert len(admitted) < NUM_CALLERS / 2
            answers = [await answer(caller) for caller in flood]
            assert all(b" 200 OK" in text.splitlines()[0] for text in answers)

    asyncio.run(main())


class CountedProtocol(HttpProtocol):
    """Counts its calls in each iteration of the event loop."""

    __slots__ = ()
    reads: Counter[int]
    losses: Counter[int]
    turn: int
    known: list[HttpProtocol]
    cycles: "list[weakref.ref[Any]]"

    @classmethod
    def start(cls) -> None:
        cls.reads, cls.losses, cls.turn, cls.known, cls.cycles = Counter(), Counter(), 0, [], []
        cls._count_turns()

    @classmethod
    def _count_turns(cls) -> None:
        cls.turn += 1
        asyncio.get_running_loop().call_soon(cls._count_turns)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.known.append(self)

    def data_received(self, data: bytes) -> None:
        self.reads[self.turn] += 1
        super().data_received(data)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self.cycles.append(weakref.ref(cycle))
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        self.losses[self.turn] += 1
        super().connection_lost(exc)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_sockets_that_become_ready_together_are_read_in_their_turns(
    make_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HttpProtocol", CountedProtocol)
    body = b'{"prompt": "a", "stream": true}'
    endless = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    endless += b"content-length: %d\r\n\r\n" % len(body) + body

    async def main() -> None:
        client = FakeClient()
        client.pause_after = 1
        CountedProtocol.start()
        async with listening(application(client)) as path:
            callers = [call(path, KEPT) for _ in range(60)]
            await until(lambda: all(map(has_answer, callers)))
            for caller in callers:
                assert caller.recv(65536).startswith(b"HTTP/1.1 200")
                caller.sendall(endless)
            await until(lambda: all(map(has_answer, callers)))
            assert sum(CountedProtocol.reads.values()) == 2 * len(callers)
            for caller in callers:
                caller.close()
            await until(lambda: len(client.ended_early) == len(callers))
            assert sum(CountedProtocol.losses.values()) == len(callers)
            # A connection that was set up in an iteration is read in the next one, beside those whose turn it is.
            assert max(CountedProtocol.reads.values()) <= 2 * MAX_AT_ONCE
            assert max(CountedProtocol.losses.values()) <= MAX_AT_ONCE
            CountedProtocol.known.clear()
            await until(lambda: not any(cycle() for cycle in CountedProtocol.cycles))  # without garbage collection
            assert len(CountedProtocol.cycles) == 2 * len(callers)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("method", ["shutdown", "timeout_keep_alive_handler"])
def test_requests_that_wait_for_their_turn_are_answered_before_the_connection_closes(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HttpProtocol", CountedProtocol)

    async def main() -> None:
        CountedProtocol.start()
        async with listening(application(FakeClient())) as path:
            callers = [call(path, KEPT) for _ in range(5 * MAX_AT_ONCE)]
            await until(lambda: all(map(has_answer, callers)))
            for caller in callers:
                caller.recv(65536)
                caller.sendall(POST)
            for connection in CountedProtocol.known:
                getattr(connection, method)()
            answers = [await answer(caller) for caller in callers]
            assert all(b" 200 OK" in text.splitlines()[0] for text in answers)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_callers_above_the_limit_are_told_to_come_back_and_probes_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "connection_limit", lambda: 2)

    async def main() -> None:
        async with listening(application(FakeClient())) as path:
            silent = [call(path, b"") for _ in range(2)]
            await asyncio.sleep(0.1)
            rejected = await answer(call(path, POST))
            assert rejected.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in rejected
            assert b" 200 OK" in (await answer(call(path, PROBE))).splitlines()[0]
            for caller in silent:
                caller.close()
            await asyncio.sleep(0.1)
            assert b" 200 OK" in (await answer(call(path, POST))).splitlines()[0]

    asyncio.run(main())


def test_unfinished_probes_leave_connections_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "connection_limit", lambda: 1)
    monkeypatch.setattr(acceptor, "NUM_PROBES", 3)

    async def main() -> None:
        async with listening(application(FakeClient())) as path:
            unfinished = [call(path, PROBE[:20]) for _ in range(4)]
            await asyncio.sleep(0.1)
            assert (await answer(call(path, PROBE))).startswith(b"HTTP/1.1 503 ")
            unfinished.pop().close()
            await asyncio.sleep(0.1)
            assert b" 200 OK" in (await answer(call(path, PROBE))).splitlines()[0]
            assert not any(map(has_answer, unfinished))
            for caller in unfinished:
                caller.close()

    asyncio.run(main())


def test_a_system_without_files_for_callers_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "RETRY_S", 0.02)
    real_accept, faults = socket.socket.accept, [OSError(24, "Too many open files")] * 3

    def accept(self: socket.socket) -> tuple[socket.socket, object]:
        if faults:
            raise faults.pop()
        return real_accept(self)

    async def main() -> None:
        async with listening(application(FakeClient())) as path:
            monkeypatch.setattr(socket.socket, "accept", accept)
            assert b" 200 OK" in (await answer(call(path, POST))).splitlines()[0]
            assert not faults

    asyncio.run(main())


def test_only_requests_for_health_are_probes() -> None:
    assert is_probe(PROBE)
    assert not is_probe(b"GET /healthy HTTP/1.1\r\n")
    assert not is_probe(POST)
