"""Calls of operators, for `octavo admin`: they see and change the requests of every frontend of an engine."""

from typing import Literal, TypeAlias

import msgspec

from octavo.protocol.ids import RequestId

LogLevel: TypeAlias = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
LOG_LEVELS: tuple[LogLevel, ...] = ("DEBUG", "INFO", "WARNING", "ERROR")

MAX_ROWS = 10_000
"""Most requests in one `RequestRows`."""


class ListRequests(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="list_requests"):
    """Result: `RequestRows`."""

    max_rows: int = 1000
    """At most `MAX_ROWS`."""


class AbortRequests(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="abort_requests"):
    """End requests of any frontend with finish reason "abort". Result: `RequestCount`, those that were live."""

    request_ids: list[RequestId] | None
    """As `RequestRow` shows them; None: all live requests."""


class DrainEngine(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="drain_engine"):
    """Reject new requests from now on, and finish the live ones. Result: `RequestCount`, those that are live.

    Ends with `is_draining=False`, or with the core: its successor accepts requests.
    """

    is_draining: bool = True


class SetLogLevel(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="set_log_level"):
    """Change the log level of the core, until it is replaced. Result: `BoolResult`."""

    level: LogLevel


AdminCall = ListRequests | AbortRequests | DrainEngine | SetLogLevel


class RequestRow(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """One live request."""

    request_id: RequestId
    """That of its frontend. Two frontends never choose the same."""
    client: str
    """The connection of its frontend, as the log of the core names it."""
    state: str
    """"running", "waiting" (also "swapped": it waits for its blocks), or "deferred": it waits for its grammar or its
    blocks from another engine, or crash suspects run in isolation."""
    num_prompt_tokens: int = 0
    """0 for a deferred request, like all numbers after it."""
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    max_tokens: int = 0
    num_preemptions: int = 0
    age_s: float = 0.0
    """Since it was queued."""


class RequestRows(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="request_rows"):
    """Result of `ListRequests`."""

    requests: list[RequestRow]
    """By frontend, in order of arrival."""
    num_live: int
    """Of all, also those that did not fit."""
    is_draining: bool


class RequestCount(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="request_count"):
    """How many requests a call was about."""

    count: int
