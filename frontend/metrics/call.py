"""`CURRENT_CALL`: the call of a client that the present task answers, for what is counted per caller.

A server sets it only if something needs it: tenants, traces or the access log.
"""

from contextvars import ContextVar
from typing import Protocol

from octavo.frontend.metrics.observer import Observer
from octavo.frontend.metrics.record import RequestRecord


class Call(Protocol):
    """One call, which may cause several requests to the engine."""

    model: str | None
    """The name of the model or the adapter that answers; None: it is not chosen yet."""

    @property
    def priority(self) -> int | None:
        """The priority of its requests; None: what they ask for."""

    @property
    def owner(self) -> str | None:
        """The tenant whose call it is; None: there are none, or it has none."""

    def on_finished(self, record: RequestRecord) -> None:
        """A request of this call finished, for whatever reason. Called on the event loop: must not block."""


CURRENT_CALL: ContextVar[Call | None] = ContextVar("octavo_call", default=None)


def report_finished(observer: Observer, record: RequestRecord, engine: int) -> None:
    """Report a finished request to the client's observer, and to the call that it was a part of."""
    observer.on_finished(record, engine)
    if (call := CURRENT_CALL.get()) is not None:
        call.on_finished(record)


def effective_priority(asked: int) -> int:
    """Return the priority of a request that asks for one: its tenant's, if that has one."""
    call = CURRENT_CALL.get()
    return asked if call is None or call.priority is None else call.priority


def current_owner() -> str | None:
    """Return the tenant whose call the present task answers; None: it answers none of a tenant."""
    call = CURRENT_CALL.get()
    return None if call is None else call.owner
