"""`RequestMap`: values by request key, in one dict per client."""

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from octavo.protocol.ids import RequestId

RequestKey = tuple[bytes, RequestId]
"""Identity of the frontend, and its id for the request. Two frontends may choose the same id."""

Value = TypeVar("Value")


class RequestMap(Generic[Value]):
    """A mapping from request keys that can also list the requests of one client.

    perf: it stores ids instead of keys. A dict with tuple keys would take 90 bytes more per request.
    """

    def __init__(self) -> None:
        self._by_client: dict[bytes, dict[RequestId, Value]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[RequestKey]:
        """Yield the keys, grouped by client and in order of arrival within a client."""
        return ((client, request_id) for client, values in self._by_client.items() for request_id in values)

    def __contains__(self, key: RequestKey) -> bool:
        return key[1] in self._by_client.get(key[0], ())

    def __getitem__(self, key: RequestKey) -> Value:
        return self._by_client[key[0]][key[1]]

    def __setitem__(self, key: RequestKey, value: Value) -> None:
        values = self._by_client.setdefault(key[0], {})
        self._length += key[1] not in values
        values[key[1]] = value

    def get(self, key: RequestKey) -> Value | None:
        """Return a value. Return None if the key is missing."""
        values = self._by_client.get(key[0])
        return None if values is None else values.get(key[1])

    def pop(self, key: RequestKey) -> Value | None:
        """Remove and return a value. Return None if the key is missing."""
        client, request_id = key
        if (values := self._by_client.get(client)) is None or request_id not in values:
            return None
        self._length -= 1
        value = values.pop(request_id)
        if not values:
            del self._by_client[client]
        return value

    def values(self) -> Iterator[Value]:
        """Yield the values, in the order of the keys."""
        return (value for values in self._by_client.values() for value in values.values())

    def items(self) -> Iterator[tuple[RequestKey, Value]]:
        """Yield keys and values."""
        return (
            ((client, request_id), value)
            for client, values in self._by_client.items()
            for request_id, value in values.items()
        )

    @property
    def clients(self) -> Iterable[bytes]:
        """The clients that have requests."""
        return self._by_client.keys()

    def ids_of(self, client: bytes) -> Iterable[RequestId]:
        """Return the ids of a client's requests, in order of arrival."""
        return self._by_client.get(client, {}).keys()
