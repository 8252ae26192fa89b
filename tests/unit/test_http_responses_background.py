"""Background responses: their states, cancelling, events that are read again, several processes, a death, a drain."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_client import MODEL, FakeClient
from http_client import PLAIN, URL, application, http_on, listening, openai_client
from openai.types.responses import Response
from response_events import PATH, ask, events_of
from waiting import until

from octavo.frontend.http.app_state import AppState
from octavo.frontend.http.background_responses import BackgroundResponses
from octavo.frontend.http.configure import RESPONSES_FILE, sharing_responses
from octavo.frontend.http.response_store import ResponseStore, StoredResponse
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
                    if line.startswith("event: response.queued"):
                        break
            client.gate.set()
            response_id = f"resp_{client.requests[0]['id'].removeprefix('resp_')}"
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
            streaming = asyncio.create_task(http.post(PATH, json=ask(background=True, stream=True)))
            await until(lambda: bool(client.requests))
            await http.post(f"{PATH}/{client.requests[0]['id']}/cancel")
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
            streaming = asyncio.create_task(owner.post(PATH, json=ask(background=True, stream=True)))
            await until(lambda: bool(client.requests))
            url = f"{PATH}/{client.requests[0]['id']}"
            reading = asyncio.create_task(other.get(f"{url}?stream=true"))
            assert (await other.post(f"{url}/cancel")).json()["status"] == "cancelled"
            assert events_of(await reading) == events_of(await streaming)
            assert (await other.post(PATH, json=ask(previous_response_id=client.requests[0]["id"]))).status_code == 200

    asyncio.run(run())


def test_a_response_whose_process_died_has_failed(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.db")
    dead, reader = ResponseStore(path), ResponseStore(path)
    response = {"id": "resp_1", "status": "in_progress", "output": []}
    dead.put(StoredResponse(response, [], 0, has_events=True), is_running=True)
    dead.add_events("resp_1", 0, [b"{}"])
    assert reader.is_running("resp_1")
    (lock,) = tmp_path.glob("*.lock")
    dead.close()
    lock.touch()  # as a process leaves it that was killed
    assert not reader.is_running("resp_1")
    found = reader.get("resp_1")
    assert found is not None and found.response["status"] == "failed"
    assert "send it again" in found.response["error"]["message"]
    assert [number for number, _ in reader.events_after("resp_1", -1)] == [0, 1]
    assert not list(tmp_path.glob("*.lock"))


def test_running_responses_are_not_dropped() -> None:
    store = ResponseStore(max_responses=1)
    store.put(StoredResponse({"id": "resp_1"}, [], 0), is_running=True)
    store.put(StoredResponse({"id": "resp_2"}, [], 0))
    assert store.get("resp_1") is not None and store.get("resp_2") is None
    store.put(StoredResponse({"id": "resp_1"}, [], 0))
    store.put(StoredResponse({"id": "resp_3"}, [], 0))
    assert store.get("resp_1") is None and store.get("resp_3") is not None


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
    assert sharing_responses(ServerConfig(api_server_count=2), tmp_path).response_store == str(
        tmp_path / RESPONSES_FILE
    )
    for config in (ServerConfig(), ServerConfig(api_server_count=2, response_store="own.db")):
        assert sharing_responses(config, tmp_path) == config


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
