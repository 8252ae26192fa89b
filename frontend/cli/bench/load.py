"""Load generator: sends requests at their arrival times, and records when each piece of a response arrives.

It has a minimal HTTP/1.1 client on asyncio streams to keep its overhead small: connections are reused, request heads
are built once, and each event is parsed once.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from octavo.frontend.cli.bench.figures import Outcome
from octavo.frontend.cli.bench.http_connection import READ_LIMIT_BYTES, HttpConnection
from octavo.frontend.cli.errors import CommandError

_DATA = b"data:"
_DONE = b"[DONE]"
_OK = 200


@dataclass(frozen=True)
class Target:
    """The server, and the settings that all requests share."""

    url: str
    """URL of the server: `http://HOST:PORT`, `https://...` or `unix:PATH`, optionally with a path prefix."""
    endpoint: str
    headers: dict[str, str]
    is_streamed: bool = True
    """Whether responses are streamed. If not, a response is one JSON object, whose end counts as its first and only
    text."""


def measure(
    target: Target,
    bodies: Sequence[bytes],
    warmups: Sequence[bytes],
    arrivals_s: Sequence[float],
    max_in_flight: int | None,
    *,
    has_bar: bool,
    on_warm: Callable[[], None] = lambda: None,
) -> tuple[float, list[Outcome]]:
    """Send the warm-ups, then every body at its arrival time. Return the duration of the latter, and all outcomes.

    Args:
        target: the server.
        bodies: JSON bodies with `stream` on.
        warmups: bodies for the warm-up, at least one; if the first fails, the benchmark stops.
        arrivals_s: arrival time of each body after the start, ascending.
        max_in_flight: maximum number of in-flight requests; None: no limit.
        has_bar: show a progress bar, if standard error is a terminal.
        on_warm: called after the warm-ups, when no request is in flight; it may block.

    Raises:
        CommandError: the first request failed.
    """
    return asyncio.run(
        _measure(Load(target), bodies, warmups, arrivals_s, max_in_flight, has_bar=has_bar, on_warm=on_warm)
    )


async def _measure(
    load: "Load",
    bodies: Sequence[bytes],
    warmups: Sequence[bytes],
    arrivals_s: Sequence[float],
    max_in_flight: int | None,
    *,
    has_bar: bool,
    on_warm: Callable[[], None],
) -> tuple[float, list[Outcome]]:
    try:
        first = await load.send(warmups[0])
        if first.error:
            raise CommandError(f"the first warm-up request failed: {first.error}")
        await load.run(warmups[1:], [0.0] * len(warmups[1:]), max_in_flight, lambda: None)
        on_warm()
        with tqdm(total=len(bodies), unit="request", disable=None if has_bar else True) as bar:
            started = time.monotonic()
            outcomes = await load.run(bodies, arrivals_s, max_in_flight, bar.update)
            return time.monotonic() - started, outcomes
    finally:
        load.close()


class Load:
    """Sends bodies to one endpoint, and times the streamed responses.

    Args:
        target: the server.
    """

    def __init__(self, target: Target) -> None:
        parts = urlsplit(target.url)
        self._is_unix = parts.scheme == "unix"
        self._path = parts.path
        self._host, self._port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        root = "" if self._is_unix else parts.path.rstrip("/").removesuffix("/v1")
        lines = [
            f"POST {root}{target.endpoint} HTTP/1.1",
            f"host: {'localhost' if self._is_unix else parts.netloc}",
            "content-type: application/json",
            *(f"{name}: {value}" for name, value in target.headers.items()),
        ]
        self._head = "\r\n".join(lines).encode()
        self._is_streamed = target.is_streamed
        self._idle: list[HttpConnection] = []

    async def run(
        self,
        bodies: Sequence[bytes],
        arrivals_s: Sequence[float],
        max_in_flight: int | None,
        on_done: Callable[[], object],
    ) -> list[Outcome]:
        """Send every body at its arrival time, or later if too many are in flight.

        Args:
            bodies: JSON bodies with `stream` on.
            arrivals_s: arrival time of each body from now, ascending.
            max_in_flight: maximum number of in-flight requests; None: no limit.
            on_done: called at the end of each response.
        """
        gate = asyncio.Semaphore(max_in_flight or max(1, len(bodies)))
        started = time.monotonic()

        async def one(body: bytes, arrival_s: float) -> Outcome:
            if (wait_s := started + arrival_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            async with gate:
                outcome = await self.send(body)
            on_done()
            return outcome

        return await asyncio.gather(*map(one, bodies, arrivals_s))

    async def send(self, body: bytes) -> Outcome:
        """Send one request and read the complete response. Failures are recorded in the outcome."""
        outcome = Outcome(sent=time.monotonic())
        try:
            head = b"%b\r\ncontent-length: %d\r\n\r\n" % (self._head, len(body))
            connection, status = await self._ask(head + body)
            await self._read_answer(connection, status, outcome)
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            outcome.error = f"{type(error).__name__}: {error}"
        outcome.finished = time.monotonic()
        if not outcome.error and not outcome.text_times:
            outcome.error = "the answer has no text"
        return outcome

    def close(self) -> None:
        """Close the connections."""
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> HttpConnection:
        if self._is_unix:
            return HttpConnection(*await asyncio.open_unix_connection(self._path, limit=READ_LIMIT_BYTES))
        return HttpConnection(
            *await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=READ_LIMIT_BYTES)
        )

    async def _ask(self, request: bytes) -> tuple[HttpConnection, int]:
        """Send a request on an idle or a new connection. Return the connection and the status."""
        while self._idle:
            connection = self._idle.pop()
            try:
                return connection, await connection.ask(request)
            except (EOFError, ConnectionError):
                connection.close()  # the server may close an idle connection at any time
        connection = await self._connect()
        try:
            return connection, await connection.ask(request)
        except BaseException:
            connection.close()
            raise

    async def _read_answer(self, connection: HttpConnection, status: int, outcome: Outcome) -> None:
        is_clean = False
        try:
            rest = b""
            async for piece in connection.body():
                now = time.monotonic()
                *lines, rest = (rest + piece).split(b"\n") if self._is_streamed else (rest + piece,)
                for line in lines if status == _OK else ():
                    if line.startswith(_DATA):
                        _take(outcome, line[len(_DATA) :].strip(), now)
                if status != _OK:
                    outcome.error = (outcome.error + piece.decode("utf-8", "replace"))[:500]
            if status != _OK:
                outcome.error = f"HTTP {status}: {outcome.error}"
            elif not self._is_streamed:
                _take(outcome, rest, time.monotonic())
                outcome.text_times.append(time.monotonic())
            is_clean = connection.is_reusable
        finally:
            if is_clean:
                self._idle.append(connection)
            else:
                connection.close()


def _take(outcome: Outcome, data: bytes, now: float) -> None:
    """Record one event."""
    if data == _DONE:
        return
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        error = event["error"]
        outcome.error = str(error.get("message", error) if isinstance(error, dict) else error)
    for choice in event.get("choices") or ():
        if text := _text(choice):
            outcome.text_times.append(now)
            outcome.text += text
    if usage := event.get("usage"):
        outcome.num_prompt_tokens = usage["prompt_tokens"]
        outcome.num_output_tokens = usage.get("completion_tokens") or 0
        outcome.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _text(choice: dict[str, Any]) -> str:
    """Return the text of a completion's or chat's choice, including reasoning."""
    if "delta" not in choice:
        return choice.get("text") or ""
    delta = choice["delta"] or {}
    return delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content") or ""
