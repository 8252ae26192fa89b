"""`Starting`: a client on its way, to be awaited or entered. Knows nothing of what it starts."""

from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar


class Closeable(Protocol):
    """What can be left."""

    async def close(self) -> None:
        """Leave it."""


Client = TypeVar("Client", bound=Closeable)


class Starting(Generic[Client]):
    """A client on its way: `await` it, or enter it with `async with`."""

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
