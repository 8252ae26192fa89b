"""`CURRENT_CALL`: the API call that the current task serves, for everything that is counted per caller.

A server sets it only if tenants, traces or the access log need it.
"""

from contextvars import ContextVar
from typing import Protocol

from octavo.frontend.metrics.observer import Observer
from octavo.frontend.metrics.record import RequestRecord


class Call(Protocol):
    """One API call, which may cause several requests to the engine."""

    model: str | None
    """Name of the model or adapter that serves the call. `None` if it is not chosen yet."""

    @property
    def priority(self) -> int | None:
        """Priority of its requests. `None`: each request's own priority."""

    @property
    def owner(self) -> str | None:
        """Tenant that made the call. `None` if there is none."""

    def on_finished(self, record: RequestRecord) -> None:
        """Handle the end of one of its requests, for whatever reason. Called on the event loop: must not block."""


CURRENT_CALL: ContextVar[Call | None] = ContextVar("octavo_call", default=None)


def report_finished(observer: Observer, record: RequestRecord, engine: int) -> None:
    """Report a finished request to the client's observer, and to the call that it belongs to."""
    observer.on_finished(record, engine)
    if (call := CURRENT_CALL.get()) is not None:
        call.on_finished(record)


def effective_priority(asked: int) -> int:
    """Return the priority of a request: its tenant's if that has one, otherwise `asked`."""
    call = CURRENT_CALL.get()
    return asked if call is None or call.priority is None else call.priority


def current_owner() -> str | None:
    """Return the tenant whose call the current task serves. `None` if there is none."""
    call = CURRENT_CALL.get()
    return None if call is None else call.owner
