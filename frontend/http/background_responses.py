"""`BackgroundResponses`: responses that are generated without a connection (`background: true`), and their events."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from octavo.frontend.http.background import BackgroundTasks
from octavo.frontend.http.render.responses import ResponseEvents
from octavo.frontend.http.response_store import ResponseStore, StoredResponse
from octavo.frontend.http.sse import NAMED_EVENTS
from octavo.frontend.outputs import RequestOutput
from octavo.protocol.errors import OctavoError

CANCEL_POLL_S = 0.5
"""How often a process looks whether another one has taken a cancel request for one of its responses."""

FOLLOW_POLL_S = 0.1
"""How often a process looks for new events of a response that another one generates."""

MAX_SEQUENCE = 2**62
"""No event comes after it."""


class BackgroundResponses:
    """The background responses of one process.

    Args:
        store: has all responses and events; None: a new one in memory.
        tasks: of the server; None: those of nobody else.
    """

    def __init__(self, store: ResponseStore | None = None, tasks: BackgroundTasks | None = None) -> None:
        self.store = store or ResponseStore()
        self.tasks = tasks or BackgroundTasks()
        self._running: dict[str, RunningResponse] = {}
        self._watching: asyncio.Task[None] | None = None

    def start(self, running: "RunningResponse", pieces: AsyncGenerator[bytes]) -> None:
        """Store a response and generate it.

        Args:
            running: fresh.
            pieces: generate it when they are read, with `running` as their renderer.
        """
        running.write(running.events.queued())
        self._running[running.id] = running
        running.task = self.tasks.start(self._run(running, pieces))
        if self.store.is_shared and self._watching is None:
            self._watching = asyncio.create_task(self._watch_cancel_requests())

    async def cancel(self, response_id: str) -> None:
        """Cancel a response, and wait until it has ended. Nothing happens if it has ended already."""
        if (running := self._running.get(response_id)) is not None:
            running.cancel()
            await asyncio.wait([running.task])
            return
        if self.store.is_running(response_id):
            self.store.request_cancel(response_id)
            async with aclosing(self.follow(response_id, MAX_SEQUENCE)) as nothing:
                async for _ in nothing:
                    pass  # waits for the end alone

    async def follow(self, response_id: str, sequence: int) -> AsyncGenerator[bytes]:
        """Yield the events of a response behind the one with this sequence number, up to the last."""
        while True:
            is_running = self.store.is_running(response_id)  # before its events, so none is missed
            if not is_running:
                self.store.get(response_id)  # ends the events of a response whose process has died
            if found := self.store.events_after(response_id, sequence):
                sequence = found[-1][0]
                yield NAMED_EVENTS.join([event for _, event in found])
            elif not is_running:
                return
            elif running := self._running.get(response_id):
                await running.has_news.wait()
            else:
                await asyncio.sleep(FOLLOW_POLL_S)

    async def _run(self, running: "RunningResponse", pieces: AsyncGenerator[bytes]) -> None:
        try:
            async with aclosing(pieces):
                async for _ in pieces:
                    pass  # `running` writes the events itself
        except OctavoError as error:
            running.write(running.events.fail(error))
        except asyncio.CancelledError:
            if not running.is_cancelled:
                raise
            running.write(running.events.cancel())
        finally:
            del self._running[running.id]

    async def _watch_cancel_requests(self) -> None:
        while self._running:
            await asyncio.sleep(CANCEL_POLL_S)
            for response_id in self.store.cancel_requests():
                if (running := self._running.get(response_id)) is not None:
                    running.cancel()
        self._watching = None


class RunningResponse:
    """One response that is being generated. Renders into the store.

    Args:
        store: of all responses.
        stored: the response before its start.
        events: fresh.
    """

    task: "asyncio.Task[None]"

    def __init__(self, store: ResponseStore, stored: StoredResponse, events: ResponseEvents) -> None:
        self.id = events.response.id
        self.events = events
        self.has_news = _News()
        self.is_cancelled = False
        self._store = store
        self._stored = stored
        self._status = ""

    def take(self, output: RequestOutput, prompt_index: int = 0) -> list[bytes]:
        """Store the events of a delta; return nothing."""
        self.write(self.events.take(output, prompt_index))
        return []

    def last(self) -> list[bytes]:
        """Return nothing."""
        return []

    def write(self, events: list[bytes]) -> None:
        """Store events, and the response if its state has changed."""
        response = self.events.response
        is_running = response.status in ("queued", "in_progress")
        if is_running:
            self._put(is_running=True)
        if self._stored.has_events and events:
            self._store.add_events(self.id, self.events.num_events - len(events), events)
        if not is_running:  # after its events: a reader takes an ended response for complete
            self._put(is_running=False)
        self.has_news.tell()

    def _put(self, *, is_running: bool) -> None:
        response = self.events.response
        if response.status != self._status:
            self._status = response.status
            self._stored.response = msgspec.to_builtins(response)
            self._store.put(self._stored, is_running=is_running)

    def cancel(self) -> None:
        """End it early, once."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self.task.cancel()


class _News:
    """Wakes everyone who waits, without remembering it."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        """Wake all waiters."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the next news."""
        await self._event.wait()
