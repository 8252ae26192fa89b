"""Background responses: their states, cancelling, events that are read again, several processes, a death, a drain."""

import asyncio
import contextlib
import json
import signal
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from fake_client import MODEL, FakeClient
from http_client import PLAIN, URL, application, http_on, listening, openai_client
from openai.types.responses import Response
from response_events import PATH, ask, events_of
from waiting import until

from octavo.frontend.http import background_responses
from octavo.frontend.http.app_state import AppState
from octavo.frontend.http.background_responses import BackgroundResponses
from octavo.frontend.http.configure import RESPONSES_FILE, with_shared_responses
from octavo.frontend.http.render.responses import ResponseEvents
from octavo.frontend.http.response_store import ResponseStore
from octavo.frontend.http.server import Server
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import OverloadedError


@contextlib.asynccontextmanager
async def serving(client: FakeClient, path: str | None = None) -> AsyncIterator[Any]:
    """Serve with a store of its own at `path`; yield an HTTP client."""
    app = application(client)
    object.__setattr__(app.state.octavo, "background_responses", BackgroundResponses(ResponseStore(path)))
    async with listening(app) as socket_path, http_on(socket_path, base_url=URL) as http:
        yield http


async def ended(http: Any, response_id: str) -> dict[str, Any]:
    """Return a response when it has ended."""
    found: dict[str, Any] = {}

    async def has_ended() -> bool:
        found.update((await http.get(f"{PATH}/{response_id}")).json())
        Response.model_validate(found)
        return found["status"] not in ("queued", "in_progress")

    async with asyncio.timeout(60):
        while not await has_ended():
            await asyncio.sleep(0.01)
    return found


async def begin_stream(http: Any) -> "tuple[asyncio.Task[Any], str]":
    """Begin a background response; return the task that reads its events, and its id."""
    begun: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def read() -> Any:
        text = ""
        async with http.stream("POST", PATH, json=ask(background=True, stream=True)) as response:
            async for line in response.aiter_lines():
                text += line + "\n"
                if line.startswith("data: ") and not begun.done():
                    begun.set_result(json.loads(line.removeprefix("data: "))["response"]["id"])
        return SimpleNamespace(status_code=response.status_code, text=text)

    task = asyncio.create_task(read())
    return task, await begun


def test_a_background_response_is_queued_then_generated() -> None:
    async def run() -> None:
        client = FakeClient("Hello!")
        client.gate = asyncio.Event()
        async with serving(client) as http:
            first = (await http.post(PATH, json=ask(background=True))).json()
            Response.model_validate(first)
            assert (first["status"], first["background"], first["output"]) == ("queued", True, [])
            early = await http.post(PATH, json=ask(previous_response_id=first["id"]))
            assert (early.status_code, early.json()["error"]["param"]) == (400, "previous_response_id")
            client.gate.set()
            done = await ended(http, first["id"])
            assert (done["status"], done["output"][0]["content"][0]["text"]) == ("completed", "Hello!")
            assert done["completed_at"] >= done["created_at"]
            unread = await http.get(f"{PATH}/{first['id']}?stream=true")
            assert (unread.status_code, unread.json()["error"]["param"]) == (400, "stream")

    asyncio.run(run())


def test_events_are_read_again_from_any_place() -> None:
    async def run() -> None:
        client = FakeClient("Hello!")
        async with serving(client) as http:
            events = events_of(await http.post(PATH, json=ask(background=True, stream=True)))
            kinds = [event["type"] for event in events]
            assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
            assert [event["response"]["status"] for event in events[:3]] == ["queued", "queued", "in_progress"]
            assert kinds[-1] == "response.completed"
            url = f"{PATH}/{events[0]['response']['id']}?stream=true"
            for after in (0, 4, len(events) - 1):
                rest = (await http.get(f"{url}&starting_after={after}")).text
                assert rest.count("event: ") == len(events) - 1 - after
            assert events_of(await http.get(url)) == events
            wrong = await http.get(f"{url}&starting_after=x")
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "starting_after")

    asyncio.run(run())


def test_a_client_that_leaves_does_not_end_it() -> None:
    async def run() -> None:
        client = FakeClient("Hello!")
        client.gate = asyncio.Event()
        async with serving(client) as http:
            async with http.stream("POST", PATH, json=ask(background=True, stream=True)) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        response_id = json.loads(line.removeprefix("data: "))["response"]["id"]
                        break
            client.gate.set()
            assert (await ended(http, response_id))["status"] == "completed"

    asyncio.run(run())


def test_cancelling() -> None:
    async def run() -> None:
        client = FakeClient("Hello!")
        client.pause_after = 2
        async with serving(client) as http:
            first = (await http.post(PATH, json=ask(background=True))).json()
            await until(lambda: bool(client.requests))
            for _ in range(2):  # the second time it has ended already
                cancelled = (await http.post(f"{PATH}/{first['id']}/cancel")).json()
                Response.model_validate(cancelled)
                assert cancelled["status"] == "cancelled"
            await until(lambda: len(client.ended_early) == 1)
            second = (await http.post(PATH, json=ask(background=True))).json()
            assert (await http.delete(f"{PATH}/{second['id']}")).json()["deleted"]
            assert (await http.get(f"{PATH}/{second['id']}")).status_code == 404

    asyncio.run(run())


def test_a_stream_of_a_cancelled_response_ends() -> None:
    async def run() -> None:
        client = FakeClient("Hello!")
        client.pause_after = 2
        async with serving(client) as http:
            streaming, response_id = await begin_stream(http)
            await until(lambda: bool(client.requests))
            await http.post(f"{PATH}/{response_id}/cancel")
            last = events_of(await streaming)[-1]
            assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")

    asyncio.run(run())


def test_a_failure_is_a_state_of_the_response() -> None:
    async def run() -> None:
        client = FakeClient("Hello!")
        client.error, client.error_after = OverloadedError("the queue is full"), 2
        async with serving(client) as http:
            first = (await http.post(PATH, json=ask(background=True))).json()
            failed = await ended(http, first["id"])
            assert failed["status"] == "failed"
            assert failed["error"] == {"code": "server_error", "message": "the queue is full"}
            last = events_of(await http.post(PATH, json=ask(stream=True)))[-1]
            assert (last["type"], last["response"]["error"]) == ("response.failed", failed["error"])

    asyncio.run(run())


def test_another_process_reads_and_cancels(tmp_path: Path) -> None:
    async def run() -> None:
        client = FakeClient("Hello!")
        client.pause_after = 2
        path = str(tmp_path / "responses.db")
        async with serving(client, path) as owner, serving(FakeClient(), path) as other:
            streaming, response_id = await begin_stream(owner)
            await until(lambda: bool(client.requests))
            url = f"{PATH}/{response_id}"
            reading = asyncio.create_task(other.get(f"{url}?stream=true"))
            assert (await other.post(f"{url}/cancel")).json()["status"] == "cancelled"
            assert events_of(await reading) == events_of(await streaming)
            assert (await other.post(PATH, json=ask(previous_response_id=response_id))).status_code == 200

    asyncio.run(run())


def test_a_slow_store_does_not_stop_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    put = ResponseStore.put

    def slow_put(*args: Any, **options: Any) -> None:
        has_begun.set()
        assert may_end.wait(60)
        put(*args, **options)

    monkeypatch.setattr(ResponseStore, "put", slow_put)

    async def run() -> None:
        async with serving(FakeClient("Hello!")) as http:
            answer = asyncio.create_task(http.post(PATH, json=ask()))
            await until(has_begun.is_set)
            assert (await http.get("/health")).status_code == 200 and not answer.done()
            may_end.set()
            assert (await answer).json()["status"] == "completed"

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["generating", "storing"])
def test_an_unexpected_error_ends_a_response_as_failed(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise sqlite3.OperationalError("disk I/O error")

    async def run() -> None:
        client = FakeClient("Hello!")
        client.gate = asyncio.Event()
        async with serving(client) as http:
            streaming, response_id = await begin_stream(http)
            await until(lambda: bool(client.requests))
            with pytest.MonkeyPatch.context() as patch:
                if fault == "generating":
                    patch.setattr(ResponseEvents, "render", fail)
                else:
                    patch.setattr(ResponseStore, "put", fail)
                    patch.setattr(ResponseStore, "add_events", fail)
                client.gate.set()
                last = events_of(await streaming)[-1]
            assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")
            assert (await ended(http, response_id))["status"] == "failed"
            assert (await http.post(f"{PATH}/{response_id}/cancel")).json()["status"] == "failed"
            assert (await http.delete(f"{PATH}/{response_id}")).json()["deleted"]

    asyncio.run(run())
    assert "disk I/O error" in caplog.text


def test_looking_for_cancel_requests_survives_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_responses, "CANCEL_POLL_S", 0.01)
    original, faults = ResponseStore.cancel_requests, [sqlite3.OperationalError("database is locked")]

    def cancel_requests(store: ResponseStore) -> list[str]:
        if faults:
            raise faults.pop()
        return original(store)

    monkeypatch.setattr(ResponseStore, "cancel_requests", cancel_requests)

    async def run() -> None:
        client = FakeClient("Hello!")
        client.pause_after = 2
        path = str(tmp_path / "responses.db")
        async with serving(client, path) as owner, serving(FakeClient(), path) as other:
            first = (await owner.post(PATH, json=ask(background=True))).json()
            await until(lambda: bool(client.requests) and not faults)
            assert (await other.post(f"{PATH}/{first['id']}/cancel")).json()["status"] == "cancelled"

    asyncio.run(run())


def test_the_id_of_a_request_does_not_choose_the_response() -> None:
    async def run() -> None:
        headers = {"x-request-id": "mine"}
        async with serving(FakeClient("Hello!")) as http:
            for options in ({}, {"stream": True}, {"background": True}, {"background": True, "stream": True}):
                bodies = [
                    (await http.post(PATH, json=ask(**options), headers=headers)).text.partition("resp_")[2]
                    for _ in range(2)
                ]
                assert bodies[0][:32] != bodies[1][:32] and "mine" not in "".join(bodies)

    asyncio.run(run())


def test_a_drain_waits_for_background_responses() -> None:
    async def run() -> None:
        client = FakeClient("Hello!")
        client.pause_after = 2
        app = application(client)
        state: AppState = app.state.octavo
        server = Server(app, PLAIN, client, state.background)
        async with listening(app) as socket_path, http_on(socket_path, base_url=URL) as http:
            first = (await http.post(PATH, json=ask(background=True))).json()
            await until(lambda: bool(client.requests))
            server.on_signal(signal.SIGTERM)
            assert state.background.is_draining and server.server_state.tasks
            server.on_signal(signal.SIGTERM)  # again: abort
            found = await ended(http, first["id"])
            assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
            await until(lambda: not server.server_state.tasks)

    asyncio.run(run())


def test_processes_share_their_responses(tmp_path: Path) -> None:
    assert with_shared_responses(ServerConfig(api_server_count=2), tmp_path).response_store == str(
        tmp_path / RESPONSES_FILE
    )
    for config in (ServerConfig(), ServerConfig(api_server_count=2, response_store="own.db")):
        assert with_shared_responses(config, tmp_path) == config


def test_openais_own_client() -> None:
    async def use() -> None:
        async with openai_client(FakeClient("Hello!")) as api:
            begun = await api.responses.create(model=MODEL, input="hi", background=True)
            assert begun.status == "queued"
            stream = await api.responses.create(model=MODEL, input="hi", background=True, stream=True)
            first = [event async for event in stream]
            again = await api.responses.retrieve(first[0].response.id, stream=True, starting_after=1)
            assert [event async for event in again] == first[2:]
            assert (await api.responses.cancel(first[0].response.id)).status == "completed"
            items = [{"role": "user", "content": str(number)} for number in range(5)]
            several = await api.responses.create(model=MODEL, input=items)
            pages = await api.responses.input_items.list(several.id, limit=2, order="asc")
            assert len(pages.data) == 2 and pages.has_more
            assert [item.content[0].text async for item in pages] == list("01234")
            newest = await api.responses.input_items.list(several.id)
            assert [item.content[0].text for item in newest.data] == list("43210")
            with pytest.raises(openai.BadRequestError, match="after"):
                await api.responses.input_items.list(several.id, after="in_none")

    asyncio.run(use())
