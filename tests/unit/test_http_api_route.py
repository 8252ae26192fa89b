"""`ApiRoute` between a minimal server and a minimal handler."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Annotated, Any

import pytest
from fake_client import FakeClient
from fastapi import APIRouter, Depends, FastAPI
from fastapi.responses import JSONResponse
from http_client import application
from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.http.auth import ApiKeyMiddleware
from octavo.frontend.http.body_reader import AT_ONCE, GRACE_S, BodyReader, BodyRejected
from octavo.frontend.http.request import ApiRequest
from octavo.frontend.http.route import ApiRoute, answer_failures
from octavo.frontend.http.sse import DONE, EventStream
from octavo.protocol.errors import OverloadedError

LEFT = {"type": "http.disconnect"}


class FakeServer:
    """Makes one request; its client stays until `leave` is called."""

    def __init__(self, *parts: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": "/x y",
            "root_path": "",
            "query_string": b"",
            "headers": headers or [],
        }
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

    @property
    def statuses(self) -> list[int]:
        return [message["status"] for message in self.sent if "status" in message]

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    def start(self, app: FastAPI) -> asyncio.Task[None]:
        return asyncio.create_task(app(self.scope, self.incoming.get, self.send))


def app_of(handler: Callable[..., Awaitable[Response]], max_body_bytes: int = 100) -> FastAPI:
    """Return an application with one route that no engine is needed for."""
    app = FastAPI()
    router = APIRouter(route_class=ApiRoute.bound_to(application(FakeClient()).state.octavo, max_body_bytes))
    router.add_api_route("/x y", answer_failures(handler), methods=["POST"], response_model=None)
    app.include_router(router)
    return app


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
        found: list[Any] = []

        async def handler(request: ApiRequest) -> Response:
            found.append((request.method, request.scope["path"], request.take_body(), request.headers.getlist("x")))
            return Response(b"hello")

        server = FakeServer(b"ab", b"", b"c", headers=[(b"x", b"first"), (b"y", b"1"), (b"x", b"second")])
        await server.start(app_of(handler))
        assert found == [("POST", "/x y", b"abc", ["first", "second"])]
        assert (server.statuses, server.body, len(server.sent)) == ([200], b"hello", 2)

    run(scenario())


def test_a_body_that_was_taken_is_not_kept_while_it_is_answered() -> None:
    num_owners = 0

    async def handler(request: ApiRequest) -> Response:
        nonlocal num_owners
        body = request.take_body()
        assert body == b"abcd"
        num_owners = sys.getrefcount(body) - 1  # the argument's own
        return Response()

    async def scenario() -> None:
        await FakeServer(b"ab", b"cd").start(app_of(handler))
        assert num_owners == 1

    run(scenario())


def test_a_dependency_of_the_embedding_application_may_read_the_body_too() -> None:
    async def body_of(request: Request) -> bytes:
        return await request.body()

    async def handler(request: ApiRequest, body: Annotated[bytes, Depends(body_of)]) -> Response:
        return Response(body + b"|" + request.take_body())

    async def scenario() -> None:
        server = FakeServer(b"ab", b"cd")
        await server.start(app_of(handler))
        assert server.body == b"abcd|abcd"

    run(scenario())


@pytest.mark.parametrize("announces", [True, False])
def test_a_rejected_body_is_not_read(announces: bool) -> None:
    async def scenario() -> None:
        server = FakeServer(b"ab", b"cd", b"ef", headers=[(b"content-length", b"6")] if announces else [])
        await server.start(app_of(never, max_body_bytes=3))
        assert server.statuses == [413]
        assert server.incoming.qsize() == (3 if announces else 1)
        server = FakeServer(b"ab")
        server.scope["method"] = "PUT"
        await server.start(app_of(never))
        assert (server.statuses, server.incoming.qsize()) == ([405], 1)

    run(scenario())


def test_a_socket_without_a_key_is_closed() -> None:
    async def scenario() -> None:
        server = FakeServer()
        server.scope["type"] = "websocket"
        await server.start(ApiKeyMiddleware(app_of(never), ["k"]))  # type: ignore[arg-type]
        assert server.sent == [{"type": "websocket.close", "code": 1008}]

    run(scenario())


def test_a_body_that_comes_too_slowly_is_rejected() -> None:
    async def scenario() -> None:
        bodies = BodyReader(max_bytes=100, grace_s=0.02)
        server = FakeServer(b"ab", b"")
        assert await bodies.read(server.incoming.get) == b"ab"
        server = FakeServer(b"ab", b"cd", b"ef")
        server.incoming._queue.pop()  # type: ignore[attr-defined]
        with pytest.raises(BodyRejected) as rejected:
            await bodies.read(server.incoming.get)
        assert rejected.value.response({"path": "/x"}).status_code == 408
        assert bodies._num_held_bytes == 0

    run(scenario())


def test_a_fast_start_does_not_excuse_a_slow_body() -> None:
    async def scenario() -> None:
        bodies = BodyReader(max_bytes=2**20, grace_s=0.02)
        server = FakeServer(b"a", b"x" * 100_000, b"")
        server.incoming._queue.pop()  # type: ignore[attr-defined]
        with pytest.raises(BodyRejected) as rejected:
            await asyncio.wait_for(bodies.read(server.incoming.get), 20)
        assert rejected.value.response({"path": "/x"}).status_code == 408

    run(scenario())


@pytest.mark.parametrize(("kib_s", "is_rejected"), [(0.9, False), (1.4, True)])
def test_a_body_in_its_pace_may_take_longer_than_the_grace(
    kib_s: float, is_rejected: bool, monkeypatch: pytest.MonkeyPatch
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

        with pytest.raises(BodyRejected) if is_rejected else contextlib.nullcontext():
            assert len(await BodyReader(max_bytes=2**20).read(receive) or b"") == 200 * 1024
        assert skipped_s > 2 * GRACE_S

    run(scenario())


def test_all_bodies_on_their_way_are_bounded_together() -> None:
    async def scenario() -> None:
        bodies = BodyReader(max_bytes=10)
        unfinished = [FakeServer(b"x" * 10, b"") for _ in range(AT_ONCE)]
        for server in unfinished:
            server.incoming._queue.pop()  # type: ignore[attr-defined]
        waiting = [asyncio.create_task(bodies.read(server.incoming.get)) for server in unfinished]
        await asyncio.sleep(0)
        with pytest.raises(BodyRejected) as rejected:
            await bodies.read(FakeServer(b"x").incoming.get)
        assert (
            rejected.value.response({"path": "/x"}).status_code,
            rejected.value.response({"path": "/x"}).headers["retry-after"],
        ) == (503, "1")
        unfinished[0].leave()
        assert await waiting[0] is None
        assert await bodies.read(FakeServer(b"x").incoming.get) == b"x"
        for server in unfinished[1:]:
            server.incoming.put_nowait({"type": "http.request", "body": b""})
        assert await asyncio.gather(*waiting[1:]) == [b"x" * 10] * (AT_ONCE - 1)
        assert bodies._num_held_bytes == 0

    run(scenario())


def test_a_client_that_leaves_within_the_body_gets_no_response() -> None:
    async def scenario() -> None:
        server = FakeServer(b"ab", b"cd")
        server.incoming._queue.pop()  # type: ignore[attr-defined]
        server.leave()
        await server.start(app_of(never))
        assert not server.sent

    run(scenario())


def test_a_disconnect_cancels_the_handler() -> None:
    async def scenario() -> None:
        server = FakeServer(b"")
        serving = server.start(app_of(never))
        await asyncio.sleep(0.01)
        server.leave()
        await serving
        assert not server.sent and not serving.cancelling()

    run(scenario())


@pytest.mark.parametrize("reads", [True, False])
def test_a_disconnect_closes_the_stream(reads: bool) -> None:
    async def scenario() -> None:
        closed = []

        async def pieces() -> AsyncGenerator[bytes]:
            try:
                yield b"a"
                await asyncio.Event().wait()
            finally:
                closed.append(True)

        async def stream() -> Response:
            return EventStream(pieces(), keep_alive_s=30)

        server = FakeServer(b"")
        if not reads:
            server.can_write.clear()
        serving = server.start(app_of(stream))
        await asyncio.sleep(0.01)
        assert (server.statuses, server.body) == ([200], b"a" if reads else b"")
        server.leave()
        await serving
        assert closed, "the engine would generate on"
        assert len(server.sent) == 1 + reads

    run(scenario())


@pytest.mark.parametrize("has_left", [True, False])
def test_the_server_may_cancel_too(has_left: bool) -> None:
    async def scenario() -> None:
        server = FakeServer(b"")
        serving = server.start(app_of(never))
        await asyncio.sleep(0.01)
        if has_left:
            server.leave()
            await asyncio.sleep(0)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving

    run(scenario())


def test_a_stream_that_the_server_cancels_is_closed_before_the_server_goes_on() -> None:
    async def scenario() -> None:
        closed, tasks = [], []

        async def pieces() -> AsyncGenerator[bytes]:
            try:
                yield b"a"
                tasks.append(asyncio.current_task())
                await asyncio.Event().wait()
            finally:
                closed.append(True)

        async def stream() -> Response:
            return EventStream(pieces(), keep_alive_s=30)

        server = FakeServer(b"")
        serving = server.start(app_of(stream))
        await asyncio.sleep(0.01)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        (task,) = tasks
        assert closed and task is not None and task.done()
        assert task is not serving, "each piece would resume the frames of all middleware"

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
            return EventStream(pieces(), keep_alive_s=30)

        server = FakeServer(b"")
        serving = server.start(app_of(stream))
        await asyncio.wait([serving])
        # The engine's own errors are no news for the server's log.
        assert serving.exception() is (None if isinstance(error, OverloadedError) else error)
        if num_pieces:
            assert server.statuses == [200] and server.body.startswith(b'adata: {"error":')
            assert server.body.endswith(DONE) and server.sent[-1]["more_body"] is False
        else:
            assert server.statuses == [503 if isinstance(error, OverloadedError) else 500]
            assert server.body.startswith(b'{"error":')

    run(scenario())


class Rejection(Exception):
    """Of an application's own."""


@pytest.mark.parametrize("where", ["dependency", "handler"])
def test_errors_of_dependencies_go_to_the_application_and_errors_of_handlers_to_octavo(where: str) -> None:
    async def check() -> None:
        if where == "dependency":
            raise Rejection("not today")

    async def handler(checked: Annotated[None, Depends(check)]) -> Response:
        raise Rejection("broken")

    async def reject(request: Request, error: Exception) -> Response:
        return JSONResponse(str(error), 418)

    async def scenario() -> None:
        app = app_of(handler)
        app.add_exception_handler(Rejection, reject)
        server = FakeServer(b"")
        serving = server.start(app)
        await asyncio.wait([serving])
        if where == "dependency":
            assert (server.statuses, server.body) == ([418], b'"not today"') and serving.exception() is None
        else:
            assert server.statuses == [500] and b"broken" not in server.body
            assert serving.exception() is not None

    run(scenario())
