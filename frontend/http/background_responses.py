"""`BackgroundResponses`: responses that are generated without a connection (`background: true`), and their events."""

import asyncio
import logging
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from octavo.frontend.http.background import BackgroundTasks
from octavo.frontend.http.render.responses import ResponseEvents
from octavo.frontend.http.response_store import ResponseStore, StoredResponse, StoreThread
from octavo.frontend.http.sse import NAMED_EVENTS
from octavo.frontend.outputs import RequestOutput
from octavo.protocol.errors import OctavoError

logger = logging.getLogger(__name__)

CANCEL_POLL_S = 0.5
"""Interval in seconds at which a process looks for cancel requests that other processes accepted for its responses."""

FOLLOW_POLL_S = 0.1
"""Interval in seconds at which a process looks for new events of a response that another process generates."""

MAX_SEQUENCE = 2**62
"""Upper bound of the sequence numbers of events."""


class BackgroundResponses:
    """The background responses of one process.

    Args:
        store: holds all responses and events; None: a new store in memory.
        tasks: the server's background tasks; None: new ones, which no server waits for.
    """

    def __init__(self, store: ResponseStore | None = None, tasks: BackgroundTasks | None = None) -> None:
        self.store = StoreThread(store or ResponseStore())
        self.tasks = tasks or BackgroundTasks()
        self._running: dict[str, RunningResponse] = {}
        self._watching: asyncio.Task[None] | None = None

    async def start(self, running: "RunningResponse", pieces: AsyncGenerator[bytes]) -> "asyncio.Task[None]":
        """Store a response, and start to generate it.

        Args:
            running: the response, not started yet.
            pieces: reading this iterator generates the response, with `running` as the renderer.

        Returns:
            The task that generates it.

        Raises:
            sqlite3.Error: the response cannot be stored.
        """
        running.add(running.events.queued())
        await running.save()
        self._running[running.id] = running
        running.task = self.tasks.start(self._run(running, pieces))
        if self.store.is_shared and self._watching is None:
            self._watching = self.tasks.start(self._watch_cancel_requests())
        return running.task

    async def cancel(self, response_id: str) -> None:
        """Cancel a response, and wait until it has ended. Do nothing if it has ended already."""
        if (running := self._running.get(response_id)) is not None:
            running.cancel()
            await asyncio.wait([running.task])
        elif await self.store.run(ResponseStore.is_running, response_id):
            await self.store.run(ResponseStore.request_cancel, response_id)
            async with aclosing(self.follow(response_id, MAX_SEQUENCE)) as nothing:
                async for _ in nothing:
                    pass  # only wait for its end

    async def follow(self, response_id: str, sequence: int) -> AsyncGenerator[bytes]:
        """Yield the events of a response that come after this sequence number, up to the last."""
        has_more = True
        while has_more:
            running = self._running.get(response_id)
            changed = None if running is None else running.changed  # read before the events, so no change is missed
            found, has_more = await self.store.run(ResponseStore.events_after, response_id, sequence)
            if found:
                sequence = found[-1][0]
                yield NAMED_EVENTS.join([event for _, event in found])
            elif changed is not None and has_more:
                await changed.wait()
            elif has_more:
                await asyncio.sleep(FOLLOW_POLL_S)

    async def _run(self, running: "RunningResponse", pieces: AsyncGenerator[bytes]) -> None:
        try:
            try:
                async with aclosing(pieces):
                    async for _ in pieces:
                        await running.save()
            except OctavoError as error:
                running.add(running.events.fail(error))
            except asyncio.CancelledError:
                if not running.is_cancelled:
                    raise
                running.add(running.events.cancel())
            await running.save()
        except Exception:
            logger.exception("response %s has failed: it cannot be generated or stored", running.id)
            await self.store.run(ResponseStore.mark_orphaned, running.id)
        finally:
            del self._running[running.id]
            running.notify()

    async def _watch_cancel_requests(self) -> None:
        """Cancel responses for which other processes have stored a cancel request, as long as there are responses."""
        try:
            while self._running or (self.store.has_orphans and not self.tasks.is_draining):
                await asyncio.sleep(CANCEL_POLL_S)
                try:
                    requests = await self.store.run(ResponseStore.cancel_requests)
                except sqlite3.Error as error:
                    logger.error("cannot read cancel requests from the response store, trying again: %s", error)
                    continue
                for response_id in requests:
                    if (running := self._running.get(response_id)) is not None:
                        running.cancel()
        finally:
            self._watching = None


class RunningResponse:
    """One response that is being generated. Its renderer writes to the store.

    Args:
        store: the store of all responses.
        stored: the response before its start.
        events: a new event builder.
    """

    task: "asyncio.Task[None]"

    def __init__(self, store: StoreThread, stored: StoredResponse, events: ResponseEvents) -> None:
        self.id = events.response.id
        self.events = events
        self.changed = asyncio.Event()
        """Set at the next change, and then replaced by a new event."""
        self.is_cancelled = False
        self._store = store
        self._stored = stored
        self._status = ""
        self._unsaved: list[bytes] = []

    def render(self, output: RequestOutput, prompt_index: int = 0) -> list[bytes]:
        """Add the events of an output delta. Return an empty piece, whose reader calls `save`."""
        self.add(self.events.render(output, prompt_index))
        return [b""]

    def last(self) -> list[bytes]:
        """Return nothing: the events are in the store."""
        return []

    def add(self, events: list[bytes]) -> None:
        """Add events; `save` will store them."""
        if self._stored.has_events:
            self._unsaved += events

    async def save(self) -> None:
        """Store the events added since the last call, and the response if its state has changed.

        Raises:
            sqlite3.Error: the store cannot be written.
        """
        events, self._unsaved = self._unsaved, []
        first = self.events.num_events - len(events)
        response = self.events.response
        if response.status != self._status:
            self._status = response.status
            stored = msgspec.structs.replace(self._stored, response=msgspec.to_builtins(response))
            is_running = response.status in ("queued", "in_progress")
            await self._store.run(ResponseStore.put, stored, is_running=is_running, first=first, events=events)
        elif events:
            await self._store.run(ResponseStore.add_events, self.id, first, events)
        self.notify()

    def notify(self) -> None:
        """Wake those who wait for a change."""
        self.changed.set()
        self.changed = asyncio.Event()

    def cancel(self) -> None:
        """End the response early. Idempotent."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self.task.cancel()
