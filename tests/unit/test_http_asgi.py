"""`AsgiApp` between a server and an application that are both a few lines: what it asks of them, and when."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from octavo.frontend.http.asgi import AsgiApp
from octavo.frontend.http.bodies import AT_ONCE, GRACE_S, Bodies, BodyRefused
from octavo.frontend.http.message import Request, Response, StreamedResponse
from octavo.protocol.errors import OverloadedError

HEAD = {"type": "http.response.start", "status": 200, "headers": []}
LEFT = {"type": "http.disconnect"}


class FakeServer:
    """Makes one request; its caller stays until `leave` is called."""

    def __init__(self, *parts: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        self.scope = {"type": "http", "method": "POST", "path": "/x y", "headers": headers or []}
        self.sent: list[dict[str, Any]] = []
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.can_write = asyncio.Event()
        self.can_write.set()
        for index, part in enumerate(parts):
            self.incoming.put_nowait({"type": "http.request", "body": part, "more_body": index < len(parts) - 1})

    def leave(self) -> None:
        self.incoming.put_nowait(LEFT)

    async def send(self, message: Any) -> None:
        self.sent.append(dict(message))
        await self.can_write.wait()

    def start(self, app: "FakeApp") -> asyncio.Task[None]:
        asgi_app = AsgiApp(app, max_body_bytes=app.max_body_bytes, keep_alive_s=app.keep_alive_s)
        return asyncio.create_task(asgi_app(self.scope, self.incoming.get, self.send))


class FakeApp:
    """Answers with what its handler returns."""

    def __init__(self, handler: Callable[[], Awaitable[Response]], refused: Response | None = None) -> None:
        self.handler = handler
        self.refused = refused
        self.max_body_bytes = 100
        self.keep_alive_s = 0.0
        self.request: Request | None = None

    def screen(self, request: Request) -> Response | None:
        self.request = request
        return self.refused

    async def answer(self, request: Request) -> Response:
        return await self.handler()

    def headers(self, request: Request) -> dict[str, str]:
        return {}

    def failure(self, request: Request, error: Exception) -> Response:
        return Response(str(error).encode(), 500)


class Stream(StreamedResponse):
    __slots__ = ("source",)

    def __init__(self, source: AsyncGenerator[bytes]) -> None:
        super().__init__()
        self.source = source

    def pieces(self) -> AsyncGenerator[bytes]:
        return self.source


async def hello() -> Response:
    return Response(b"hello")


async def never() -> Response:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def run(scenario: Awaitable[None]) -> None:
    """Run it, and see that no task is left behind."""

    async def main() -> None:
        await scenario
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left

    asyncio.run(main())


def test_a_request_is_read_whole_and_answered() -> None:
    async def scenario() -> None:
        server = FakeServer(b"ab", b"", b"c", headers=[(b"x", b"first"), (b"y", b"1"), (b"x", b"second")])
        app = FakeApp(hello)
        await server.start(app)
        request = app.request
        assert request and (request.method, request.path, request.body) == ("POST", "/x y", b"abc")
        assert request.headers == {b"x": b"first", b"y": b"1"}
        assert server.sent == [
            HEAD | {"headers": [(b"content-length", b"5")]},
            {"type": "http.response.body", "body": b"hello"},
        ]

    run(scenario())


def test_a_body_that_was_taken_is_not_kept_while_it_is_answered() -> None:
    num_owners = 0

    class Taker(FakeApp):
        async def answer(self, request: Request) -> Response:
            nonlocal num_owners
            body = request.take_body()
            assert body == b"abcd"
            num_owners = sys.getrefcount(body) - 1  # the argument's own
            return await self.handler()

    async def scenario() -> None:
        await FakeServer(b"ab", b"cd").start(Taker(hello))
        assert num_owners == 1

    run(scenario())


@pytest.mark.parametrize("scope", ["lifespan", "websocket"])
def test_nothing_but_http_is_served(scope: str) -> None:
    async def scenario() -> None:
        server = FakeServer()
        server.scope["type"] = scope
        with pytest.raises(ValueError, match=scope):
            await server.start(FakeApp(hello))
        assert not server.sent

    run(scenario())


@pytest.mark.parametrize("announces", [True, False])
def test_what_is_refused_is_not_read(announces: bool) -> None:
    async def scenario() -> None:
        app = FakeApp(never)
        app.max_body_bytes = 3
        server = FakeServer(b"ab", b"cd", b"ef", headers=[(b"content-length", b"6")] if announces else [])
        await server.start(app)
        assert server.sent[0]["status"] == 413
        assert server.incoming.qsize() == (3 if announces else 1)
        server = FakeServer(b"ab")
        await server.start(FakeApp(never, refused=Response(status=401)))
        assert (server.sent[0]["status"], server.incoming.qsize()) == (401, 1)

    run(scenario())


def test_a_body_that_comes_too_slowly_is_refused() -> None:
    async def scenario() -> None:
        bodies = Bodies(max_bytes=100, grace_s=0.02)
        server = FakeServer(b"ab", b"")
        assert await bodies.receive(server.incoming.get) == b"ab"
        server = FakeServer(b"ab", b"cd", b"ef")
        server.incoming._queue.pop()  # type: ignore[attr-defined]
        with pytest.raises(BodyRefused) as refused:
            await bodies.receive(server.incoming.get)
        assert refused.value.response.status == 408
        assert bodies._num_held_bytes == 0

    run(scenario())


def test_who_has_sent_much_at_once_may_not_rest_on_it() -> None:
    async def scenario() -> None:
        bodies = Bodies(max_bytes=2**20, grace_s=0.02)
        server = FakeServer(b"a", b"x" * 100_000, b"")
        server.incoming._queue.pop()  # type: ignore[attr-defined]
        with pytest.raises(BodyRefused) as refused:
            await asyncio.wait_for(bodies.receive(server.incoming.get), 20)
        assert refused.value.response.status == 408

    run(scenario())


@pytest.mark.parametrize(("kib_s", "is_refused"), [(0.9, False), (1.4, True)])
def test_a_body_in_its_pace_may_take_longer_than_the_grace(
    kib_s: float, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        clock, skipped_s = loop.time, 0.0
        monkeypatch.setattr(loop, "time", lambda: clock() + skipped_s)
        server = FakeServer(*[b"x" * 1024] * 200)

        async def receive() -> Any:
            nonlocal skipped_s
            skipped_s += kib_s
            await asyncio.sleep(0)
            return await server.incoming.get()

        with pytest.raises(BodyRefused) if is_refused else contextlib.nullcontext():
            assert len(await Bodies(max_bytes=2**20).receive(receive) or b"") == 200 * 1024
        assert skipped_s > 2 * GRACE_S

    run(scenario())


def test_all_bodies_on_their_way_are_bounded_together() -> None:
    async def scenario() -> None:
        bodies = Bodies(max_bytes=10)
        unfinished = [FakeServer(b"x" * 10, b"") for _ in range(AT_ONCE)]
        for server in unfinished:
            server.incoming._queue.pop()  # type: ignore[attr-defined]
        waiting = [asyncio.create_task(bodies.receive(server.incoming.get)) for server in unfinished]
        await asyncio.sleep(0)
        with pytest.raises(BodyRefused) as refused:
            await bodies.receive(FakeServer(b"x").incoming.get)
        assert (refused.value.response.status, refused.value.response.headers["retry-after"]) == (503, "1")
        unfinished[0].leave()
        assert await waiting[0] is None
        assert await bodies.receive(FakeServer(b"x").incoming.get) == b"x"
        for server in unfinished[1:]:
            server.incoming.put_nowait({"type": "http.request", "body": b""})
        assert await asyncio.gather(*waiting[1:]) == [b"x" * 10] * (AT_ONCE - 1)
        assert bodies._num_held_bytes == 0

    run(scenario())


def test_a_caller_who_leaves_within_the_body_is_not_answered() -> None:
    async def scenario() -> None:
        server = FakeServer(b"ab", b"cd")
        server.incoming._queue.pop()  # type: ignore[attr-defined]
        server.leave()
        await server.start(FakeApp(never))
        assert not server.sent

    run(scenario())


def test_a_caller_who_leaves_cancels_the_work() -> None:
    async def scenario() -> None:
        server = FakeServer(b"")
        serving = server.start(FakeApp(never))
        await asyncio.sleep(0.01)
        server.leave()
        await serving
        assert not server.sent and not serving.cancelling()

    run(scenario())


@pytest.mark.parametrize("reads", [True, False])
def test_a_caller_who_leaves_closes_the_stream(reads: bool) -> None:
    async def scenario() -> None:
        closed = []

        async def pieces() -> AsyncGenerator[bytes]:
            try:
                yield b"a"
                await asyncio.Event().wait()
            finally:
                closed.append(True)

        async def stream() -> Response:
            return Stream(source)

        source = pieces()
        server = FakeServer(b"")
        if not reads:
            server.can_write.clear()
        serving = server.start(FakeApp(stream))
        await asyncio.sleep(0.01)
        assert server.sent == [HEAD, {"type": "http.response.body", "body": b"a", "more_body": True}][: 1 + reads]
        server.leave()
        await serving
        assert closed, "the engine would generate on"
        assert len(server.sent) == 1 + reads

    run(scenario())


@pytest.mark.parametrize("has_left", [True, False])
def test_the_server_may_cancel_too(has_left: bool) -> None:
    async def scenario() -> None:
        server = FakeServer(b"")
        serving = server.start(FakeApp(never))
        await asyncio.sleep(0.01)
        if has_left:
            server.leave()
            await asyncio.sleep(0)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving

    run(scenario())


@pytest.mark.parametrize("error", [OverloadedError("full"), ZeroDivisionError("full")])
@pytest.mark.parametrize("num_pieces", [0, 1])
def test_failures_of_a_stream(error: Exception, num_pieces: int) -> None:
    async def scenario() -> None:
        async def pieces() -> AsyncGenerator[bytes]:
            for _ in range(num_pieces):
                yield b"a"
            raise error

        async def stream() -> Response:
            return Stream(pieces())

        server = FakeServer(b"")
        serving = server.start(FakeApp(stream))
        await asyncio.wait([serving])
        # An error that may happen is no news for the server, unless nobody else can tell of it.
        assert serving.exception() is (None if isinstance(error, OverloadedError) and not num_pieces else error)
        assert server.sent[0]["status"] == (200 if num_pieces else 500)
        last = server.sent[-1]
        assert last == {"type": "http.response.body"} | ({} if num_pieces else {"body": b"full"})

    run(scenario())
