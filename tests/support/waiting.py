"""Waits with deadlines: a condition that never becomes true fails its test with the last value."""

import asyncio
import inspect
import select
import threading
import time
from collections.abc import Callable
from typing import IO, Any, TypeVar

T = TypeVar("T")

TIMEOUT_S = 120.0
"""Default deadline in seconds; generous, so that a slow machine fails no test."""


def wait_until(
    condition: Callable[[], T],
    details: Callable[[], object] = lambda: "",
    *,
    timeout_s: float = TIMEOUT_S,
    interval_s: float = 0.02,
) -> T:
    """Return the first true value of `condition`; fail with `details` after the deadline."""
    __tracebackhide__ = True
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, _expired(timeout_s, value, details)
        time.sleep(interval_s)
    return value


async def until(
    condition: Callable[[], Any],
    details: Callable[[], object] = lambda: "",
    *,
    timeout_s: float = TIMEOUT_S,
    interval_s: float = 0.005,
) -> Any:
    """Like `wait_until`, on an event loop; the condition may be a coroutine function."""
    __tracebackhide__ = True
    deadline = time.monotonic() + timeout_s
    while not (value := await _value(condition)):
        assert time.monotonic() < deadline, _expired(timeout_s, value, details)
        await asyncio.sleep(interval_s)
    return value


def read_line(stream: IO[Any] | None, timeout_s: float = TIMEOUT_S) -> Any:
    """Return the next line of a pipe, of which no buffer may hold data already."""
    __tracebackhide__ = True
    assert stream is not None
    assert select.select([stream], [], [], timeout_s)[0], f"no line came within {timeout_s:g} s"
    return stream.readline()


def join(thread: threading.Thread, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until a thread has ended."""
    __tracebackhide__ = True
    thread.join(timeout_s)
    assert not thread.is_alive(), f"{thread.name} still runs after {timeout_s:g} s"


async def _value(condition: Callable[[], Any]) -> Any:
    value = condition()
    return await value if inspect.isawaitable(value) else value


def _expired(timeout_s: float, value: object, details: Callable[[], object]) -> str:
    return f"still {value!r} after {timeout_s:g} s\n{details()}"
