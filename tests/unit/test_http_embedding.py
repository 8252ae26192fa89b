"""The routes inside other applications: mounted, included under a prefix, with dependencies and middleware."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from fake_client import MODEL, FakeClient
from fastapi import BackgroundTasks, Depends, FastAPI, Header, HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import octavo
from octavo.frontend.http.middleware import load_middleware
from octavo.protocol.errors import ConfigError, OverloadedError

PATH = "/v1/completions"
ASK = {"model": MODEL, "prompt": "ab", "max_tokens": 3}


@contextlib.asynccontextmanager
async def http_to(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://app") as http:
        yield http


def call(app: ASGIApp, method: str, path: str, **options: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        async with http_to(app) as http:
            return await http.request(method, path, **options)

    return asyncio.run(main())


def own_application() -> FastAPI:
    app = FastAPI()

    @app.get("/mine")
    async def mine() -> dict[str, int]:
        return {"mine": 1}

    return app


def included(prefix: str = "") -> FastAPI:
    app = own_application()
    app.include_router(octavo.create_router(FakeClient()), prefix=prefix)
    return app


def mounted(prefix: str) -> FastAPI:
    app = own_application()
    app.mount(prefix, octavo.create_app(FakeClient()))
    return app


@pytest.mark.parametrize(
    ("app", "prefix"),
    [(included(), ""), (included("/llm"), "/llm"), (mounted("/llm"), "/llm"), (octavo.create_app(FakeClient()), "")],
    ids=["included", "included under a prefix", "mounted", "itself"],
)
def test_routes_answer_wherever_they_are(app: FastAPI, prefix: str) -> None:
    whole = call(app, "POST", prefix + PATH, json=ASK)
    assert whole.status_code == 200 and whole.json()["choices"][0]["text"]
    stream = call(app, "POST", prefix + PATH, json=ASK | {"stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream") and stream.text.endswith("data: [DONE]\n\n")
    assert call(app, "GET", prefix + f"/v1/models/{MODEL}").json()["id"] == MODEL
    rejected = call(app, "POST", prefix + PATH, json=ASK | {"n": "x"})
    assert (rejected.status_code, rejected.json()["error"]["param"]) == (400, "n")
    assert call(app, "POST", prefix + PATH, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
    if prefix:
        assert call(app, "POST", PATH, json=ASK).status_code == 404
        assert call(app, "GET", "/mine").json() == {"mine": 1}


def test_a_root_path_of_the_outer_application_changes_nothing() -> None:
    async def main() -> None:
        for app in (included("/llm"), mounted("/llm")):
            transport = httpx.ASGITransport(app, root_path="/outer")
            async with httpx.AsyncClient(transport=transport, base_url="http://app") as http:
                assert (await http.post("/outer/llm" + PATH, json=ASK)).status_code == 200

    asyncio.run(main())


def test_a_mounted_application_knows_its_place() -> None:
    app = own_application()
    app.mount("/llm", octavo.create_app(FakeClient(), octavo.ServerConfig(api_key=["k"])))
    assert call(app, "GET", "/llm/health").status_code == 200
    rejected = call(app, "GET", "/llm/docs")
    assert rejected.status_code == 401 and rejected.headers["www-authenticate"].startswith("Basic")
    headers = {"authorization": "Bearer k"}
    assert call(app, "GET", "/llm/openapi.json", headers=headers).json()["servers"] == [{"url": "/llm"}]
    assert call(app, "GET", "/llm/", headers=headers).headers["content-type"].startswith("text/html")
    nowhere = call(app, "DELETE", "/llm/ping", headers=headers)
    assert (nowhere.status_code, nowhere.headers["allow"]) == (405, "GET, POST, HEAD, OPTIONS")


def test_the_outer_document_describes_our_routes_with_schemas_of_their_own() -> None:
    app = included("/llm")
    document = call(app, "GET", "/openapi.json").json()
    assert call(app, "GET", "/docs").status_code == 200
    body = document["paths"]["/llm/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "max_tokens", "temperature"} < body["properties"].keys()
    text = str(document)
    names = {part.partition("'")[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= document.get("components", {}).get("schemas", {}).keys()
    assert "/mine" in document["paths"]


def test_dependencies_of_the_outer_application_come_first() -> None:
    async def require(x_user: str = Header("")) -> None:
        if not x_user:
            raise HTTPException(401, "who are you?")

    client = FakeClient()
    app = FastAPI()
    app.include_router(octavo.create_router(client), dependencies=[Depends(require)])
    rejected = call(app, "POST", PATH, json=ASK)
    assert (rejected.status_code, rejected.json()) == (401, {"detail": "who are you?"}) and not client.requests
    assert call(app, "POST", PATH, json=ASK, headers={"X-User": "me"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_dependencies_clean_up_after_the_response(stream: bool) -> None:
    """The server reports the end of the response as a disconnect, which must not cancel them."""
    done = []

    async def finish(what: str) -> None:
        await asyncio.sleep(0.01)
        done.append(what)

    async def session(tasks: BackgroundTasks) -> AsyncIterator[None]:
        tasks.add_task(finish, "task")
        yield
        await finish("session")

    app = FastAPI()
    app.include_router(octavo.create_router(FakeClient()), dependencies=[Depends(session)])
    assert call(app, "POST", PATH, json=ASK | {"stream": stream}).status_code == 200
    assert sorted(done) == ["session", "task"]


def test_an_application_chooses_the_engine() -> None:
    first, second = FakeClient("one"), FakeClient("two")
    app = FastAPI()
    app.include_router(octavo.create_router(first))

    async def choose(request: Request) -> FakeClient:
        if request.headers.get("x-engine") == "none":
            raise OverloadedError("no engine is free")
        return second if request.headers.get("x-engine") == "second" else first

    app.dependency_overrides[octavo.get_client] = choose
    texts = [
        call(app, "POST", PATH, json=ASK, headers={"x-engine": name}).json()["choices"][0]["text"]
        for name in ("first", "second", "second")
    ]
    assert texts == ["one", "two", "two"] and (len(first.requests), len(second.requests)) == (1, 2)
    rejected = call(app, "POST", PATH, json=ASK, headers={"x-engine": "none"})
    assert (rejected.status_code, rejected.json()["error"]["message"]) == (503, "no engine is free")


async def to_second(request: Request) -> FakeClient:
    return FakeClient("two")


async def own_completion(request: Request) -> Response:
    return Response(b'{"choices": [{"text": "mine"}]}')


OWN_ROUTE = Route(PATH, own_completion, methods=["POST"])


@pytest.mark.parametrize(
    ("owner_adds", "text", "is_direct"),
    [
        (lambda app: None, "one", True),
        (lambda app: app.router.routes.append(OWN_ROUTE), "one", True),
        (lambda app: app.router.routes.insert(0, OWN_ROUTE), "mine", False),
        (lambda app: app.dependency_overrides.update({octavo.get_client: to_second}), "two", False),
        (lambda app: app.add_middleware(Stamp), "one", False),
    ],
    ids=["nothing", "route behind ours", "route before ours", "override", "middleware"],
)
def test_a_route_is_called_directly_unless_the_owner_added_something_before_it(
    owner_adds: Callable[[FastAPI], None], text: str, is_direct: bool
) -> None:
    scopes = []
    app = octavo.create_app(FakeClient("one"))
    owner_adds(app)

    async def noted(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await app(scope, receive, send)

    answer = call(noted, "POST", PATH, json=ASK)
    assert answer.json()["choices"][0]["text"] == text
    assert ("router" not in scopes[0]) == is_direct
    assert scopes[0]["headers"], "what wraps the application may read them after the response"
    assert answer.headers.get("x-stamp") == (None if app.user_middleware[0].cls is not Stamp else "class")


def test_an_observer_of_the_applications_own_stays() -> None:
    client = FakeClient()
    octavo.create_router(client)
    metrics = client.observer
    assert octavo.create_app(client).state.octavo.metrics is metrics is client.observer


class Stamp:
    """ASGI middleware by class."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", b"class")]
            elif b"[DONE]" in message["body"] or b"data: " in message["body"]:
                message["body"] = b": seen\n\n" + message["body"]
            await send(message)

        await self.app(scope, receive, stamped)


def test_middleware_of_an_application_mounted_in_ours_gets_each_piece_of_a_stream() -> None:
    inner = FastAPI()
    inner.add_middleware(Stamp)
    inner.include_router(octavo.create_router(FakeClient()))
    app = octavo.create_app(FakeClient())
    app.mount("/inner", inner)
    stream = call(app, "POST", "/inner" + PATH, json=ASK | {"stream": True})
    assert stream.headers["x-stamp"] == "class" and stream.text.count(": seen") == 4


async def reject_teapots(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Middleware by function."""
    if request.headers.get("x-teapot"):
        return Response(status_code=418)
    return await call_next(request)


def test_middleware_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_middleware", sys.modules[__name__])
    names = ["own_middleware.Stamp", "own_middleware.reject_teapots"]
    app = octavo.create_app(FakeClient(), octavo.ServerConfig(middleware=names))
    assert call(app, "POST", PATH, json=ASK).headers["x-stamp"] == "class"
    stream = call(app, "POST", PATH, json=ASK | {"stream": True})
    assert stream.text.endswith("data: [DONE]\n\n") and stream.headers["x-stamp"] == "class"
    assert stream.text.count(": seen") == 4, "each piece of a stream goes through it"
    rejected = call(app, "POST", PATH, json=ASK, headers={"x-teapot": "1"})
    assert rejected.status_code == 418 and "x-stamp" not in rejected.headers, "the last one is outermost"


@pytest.mark.parametrize("name", ["nowhere.Class", "json.nothing", "plain", "octavo.frontend.http.sse.DONE"])
def test_middleware_that_cannot_be_is_rejected_at_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load_middleware([name])
