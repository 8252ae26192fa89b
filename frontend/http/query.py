"""Query parameters of a URL, with errors that name them; pagination of lists."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from starlette.datastructures import QueryParams

from octavo.protocol.errors import InvalidRequestError

T = TypeVar("T")

Order = Literal["asc", "desc"]


def flag(query: QueryParams, name: str) -> bool:
    """Return a boolean parameter; False if it is missing.

    Raises:
        InvalidRequestError: the value is neither true nor false.
    """
    match query.get(name, "false"):
        case "true" | "True" | "1":
            return True
        case "false" | "False" | "0" | "":
            return False
    raise InvalidRequestError(f"{name} must be true or false, got {query[name][:100]!r}", name)


def integer(query: QueryParams, name: str, default: int, *, least: int, most: int | None = None) -> int:
    """Return an integer parameter.

    Raises:
        InvalidRequestError: the value is not an integer, or it is out of bounds.
    """
    text = query.get(name)
    if text is None:
        return default
    digits = text.removeprefix("-")
    is_number = digits.isascii() and digits.isdecimal() and len(digits) < 19
    if not is_number or int(text) < least or (most is not None and int(text) > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise InvalidRequestError(f"{name} must be an integer {bounds}, got {text[:100]!r}", name)
    return int(text)


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list."""

    items: Sequence[T]
    has_more: bool


@dataclass(frozen=True, slots=True)
class Paging:
    """Which page of a list a request wants."""

    limit: int
    order: Order
    after: str | None

    @classmethod
    def of(cls, query: QueryParams, *, default: int = 20, most: int = 100) -> "Paging":
        """Parse `limit`, `order` and `after`. The default order is newest first.

        Raises:
            InvalidRequestError: one of them is invalid.
        """
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequestError(f"order must be asc or desc, got {order[:100]!r}", "order")
        limit = integer(query, "limit", default, least=1, most=most)
        return cls(limit, "asc" if order == "asc" else "desc", query.get("after"))

    def page(self, items: Sequence[T], id_of: Callable[[T], str]) -> Page[T]:
        """Return the page of a list that is sorted from the oldest item to the newest.

        Raises:
            InvalidRequestError: no item has the id `after`.
        """
        ordered = list(items) if self.order == "asc" else list(reversed(items))
        start = 0
        if self.after is not None:
            ids = [id_of(item) for item in ordered]
            if self.after not in ids:
                raise InvalidRequestError(f"after: the list has no item {self.after[:100]!r}", "after")
            start = ids.index(self.after) + 1
        end = start + self.limit
        return Page(ordered[start:end], end < len(ordered))
