"""`CancelOnDisconnect`: cancels a request's work when its client disconnects, which also stops the engine."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from starlette.types import Message, Receive, Send


class MessageEvent:
    """Replaces the `asyncio.Event` that uvicorn sets for each part of a request and when the client disconnects.

    It also calls a function, so no task has to wait for the disconnect. Its waiters need no deque (760 bytes).
    """

    __slots__ = ("_is_set", "_waiters", "on_set")

    def __init__(self) -> None:
        self.on_set: Callable[[], None] | None = None
        """Called whenever the event is set."""
        self._is_set = False
        self._waiters: tuple[asyncio.Future[None], ...] = ()

    def set(self) -> None:
        """Wake all waiters."""
        self._is_set = True
        waiters, self._waiters = self._waiters, ()
        for waiter in waiters:
            if not waiter.done():  # already done if its task was cancelled
                waiter.set_result(None)
        if self.on_set is not None:
            self.on_set()

    def clear(self) -> None:
        """Reset the event: later waiters wait."""
        self._is_set = False

    async def wait(self) -> None:
        """Wait until the event is set."""
        if not self._is_set:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters = (*self._waiters, waiter)
            await waiter


class CancelOnDisconnect:
    """A context that the current task leaves early, without an error, when the client disconnects.

    If `receive` is the server's own function, the connection cancels the task directly. If a middleware has wrapped it,
    a second task awaits it; nothing else may await it meanwhile.

    Args:
        receive: the ASGI receive function of a request whose body has been received.
    """

    __slots__ = ("_cycle", "_is_disconnected", "_receive", "_task", "_watcher")

    def __init__(self, receive: "Receive") -> None:
        cycle = getattr(receive, "__self__", None)
        has_event = isinstance(cycle, RequestResponseCycle) and isinstance(cycle.message_event, MessageEvent)
        self._cycle: RequestResponseCycle | None = cycle if has_event else None
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None
        self._is_disconnected = False

    def __enter__(self) -> "CancelOnDisconnect":
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[Any] = task
        if self._cycle is None:
            self._watcher = asyncio.create_task(self._watch())
        else:
            self._cycle.flow.resume_reading()  # paused after a large body; a disconnect would go unnoticed
            self._event(self._cycle).on_set = self._on_message
            self._on_message()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._cycle is not None:
            self._event(self._cycle).on_set = None
        elif self._watcher is not None:
            self._watcher.cancel()
        # Something else may have cancelled the task as well.
        return kind is asyncio.CancelledError and self._is_disconnected and not self._task.uncancel()

    @property
    def is_direct(self) -> bool:
        """Return whether `receive` is our own server's function, so the application is the only caller."""
        return self._cycle is not None

    def ending_with_response(self, send: "Send") -> "Send":
        """Return a `send` function after whose last message nothing is cancelled any more.

        Servers report a disconnect at the end of the response, while dependencies of an embedding application still
        clean up.
        """
        if (watcher := self._watcher) is None:  # the connection reports only clients that disconnect before the end
            return send

        def send_and_end(message: "Message") -> "Awaitable[None]":
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                watcher.cancel()
            return send(message)

        return send_and_end

    def _on_message(self) -> None:
        if self._cycle is not None and self._cycle.disconnected:
            self._cancel()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._cancel()

    def _cancel(self) -> None:
        if not self._is_disconnected:
            self._is_disconnected = True
            self._task.cancel()

    @staticmethod
    def _event(cycle: RequestResponseCycle) -> MessageEvent:
        assert isinstance(cycle.message_event, MessageEvent)
        return cycle.message_event
