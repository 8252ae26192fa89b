"""Operators' calls for `octavo admin`. They view and change the requests of all frontends of an engine."""

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
    """Abort requests of any frontend with finish reason "abort". Result: `RequestCount`, those that were live."""

    request_ids: list[RequestId] | None
    """Ids as shown in `RequestRow`. None for all live requests."""


class DrainEngine(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="drain_engine"):
    """Reject new requests from now on, and finish the live ones. Result: `RequestCount`, the live ones.

    Ends with `is_draining=False` or with the core: its successor accepts requests.
    """

    is_draining: bool = True


class SetLogLevel(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="set_log_level"):
    """Change the log level of the core until it is replaced. Result: `BoolResult`."""

    level: LogLevel


AdminCall = ListRequests | AbortRequests | DrainEngine | SetLogLevel


class RequestRow(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """One live request."""

    request_id: RequestId
    """Id chosen by its frontend. Two frontends never choose the same id."""
    client: str
    """The connection of its frontend, as named in the log of the core."""
    state: str
    """"running", "waiting" (which includes "swapped": waiting for its blocks) or "deferred". A deferred request waits
    for its grammar or for blocks from another engine, or is held while crash suspects run in isolation."""
    num_prompt_tokens: int = 0
    """0 for a deferred request, like all numbers below."""
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    max_tokens: int = 0
    num_preemptions: int = 0
    age_s: float = 0.0
    """Seconds since it was queued."""


class RequestRows(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="request_rows"):
    """Result of `ListRequests`."""

    requests: list[RequestRow]
    """Grouped by frontend, in order of arrival."""
    num_live: int
    """Number of all live requests, including those that did not fit."""
    is_draining: bool


class RequestCount(msgspec.Struct, array_like=True, gc=False, frozen=True, tag="request_count"):
    """The number of requests that a call affected."""

    count: int
