"""`HttpCall`: one HTTP request, with the statistics of the engine requests that it causes."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from starlette.types import Scope

from octavo.frontend.calls.tracer import RequestTracer
from octavo.frontend.http.request import RequestId, route_path
from octavo.frontend.metrics.record import RequestRecord
from octavo.frontend.tenants.file import Tenant
from octavo.frontend.tenants.usage import TenantUsage

_CALL = "octavo.call"

CALLER = "octavo.caller"
"""Key of scopes whose `Caller` is known before the call is created: requests that this server makes for a tenant."""


class Caller(NamedTuple):
    """A tenant, and the counter of its tokens."""

    tenant: Tenant
    usage: TenantUsage


class HttpCall:
    """Counts the usage of its engine requests, creates their spans, and becomes one line of the access log.

    Args:
        scope: the ASGI scope of the HTTP request, in which the call is stored.
        tracer: creates the spans; None: no spans.
    """

    __slots__ = (
        *("_context", "_request_id", "_tracer", "finish_reasons", "first_token_s", "model", "num_cached_tokens"),
        *("num_generation_tokens", "num_prompt_tokens", "on_end", "path", "started_s", "status", "tenant", "usage"),
    )

    def __init__(self, scope: Scope, tracer: RequestTracer | None) -> None:
        scope[_CALL] = self
        self.path = route_path(scope)
        self.started_s = time.monotonic()
        self.model: str | None = None
        self.status: int | None = None
        """HTTP status; `None` before the response has begun."""
        self.tenant: Tenant | None
        self.usage: TenantUsage | None
        self.tenant, self.usage = scope.get(CALLER, (None, None))
        """The tenant, and the counter of its tokens; `None` if the request has no tenant's key."""
        self.on_end: Callable[[], None] = _do_nothing
        """Called when the request has ended."""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generation_tokens = 0
        self.first_token_s: float | None = None
        """Seconds from arrival to the first token, for the engine request that ended first."""
        self.finish_reasons: list[str] = []
        self._request_id = RequestId.of(scope)
        self._tracer = tracer
        self._context: Any = None if tracer is None else tracer.context_of(scope["headers"])

    @classmethod
    def of(cls, scope: Scope) -> "HttpCall | None":
        """Return the call of a scope; `None` if calls are not recorded."""
        found = scope.get(_CALL)
        return found if isinstance(found, cls) else None

    @property
    def owner(self) -> str | None:
        """See `Call.owner`."""
        return None if self.tenant is None else self.tenant.name

    @property
    def priority(self) -> int | None:
        """See `Call`."""
        return None if self.tenant is None else self.tenant.priority

    @property
    def request_id(self) -> str:
        """The request id in the response."""
        return self._request_id.text

    def hold(self) -> Callable[[], None]:
        """Keep the request open after its response. Return a function to call when the work has ended."""
        on_end, self.on_end = self.on_end, _do_nothing
        return on_end

    def on_finished(self, record: RequestRecord) -> None:
        """See `Call`."""
        self.num_prompt_tokens += record.num_prompt_tokens
        self.num_cached_tokens += record.num_cached_tokens
        self.num_generation_tokens += record.num_generation_tokens
        self.finish_reasons.append(record.finish_reason)
        if self.first_token_s is None and record.timings.first_token:
            self.first_token_s = record.first_token_s
        if self.tenant is not None and self.usage is not None:
            self.usage.spend(self.tenant, record.num_prompt_tokens, record.num_generation_tokens)
        if self._tracer is not None:
            self._tracer.on_finished(record, self._context, self.request_id, self.model)


def tenant_name(scope: Scope) -> str | None:
    """Return the name of the tenant whose key a request has; `None` if it has no tenant's key."""
    call = HttpCall.of(scope)
    return None if call is None or call.tenant is None else call.tenant.name


def may_see(scope: Scope, owner: str | None) -> bool:
    """Return whether a request may see a tenant's object: tenants see only their own, all others see everything.

    Args:
        scope: the ASGI scope of the request.
        owner: the name of the owning tenant; None: the object belongs to no tenant.
    """
    return tenant_name(scope) in (None, owner)


def _do_nothing() -> None:
    pass
