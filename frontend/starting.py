"""`Starting`: a client that is starting, to be awaited or entered. It works with any kind of client."""

from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar


class Closeable(Protocol):
    """A client that can be closed."""

    async def close(self) -> None:
        """Close it."""


Client = TypeVar("Client", bound=Closeable)


class Starting(Generic[Client]):
    """A client that is starting: `await` it, or enter it with `async with`."""

    def __init__(self, start: Callable[[], Awaitable[Client]]) -> None:
        self._start = start
        self._client: Client | None = None

    def __await__(self) -> Generator[Any, None, Client]:
        return self._start().__await__()

    async def __aenter__(self) -> Client:
        self._client = await self._start()
        return self._client

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client:
            await self._client.close()
