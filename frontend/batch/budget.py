"""`LineBudget`: what a tenant's limits allow the requests of its batches."""

import logging
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from octavo.frontend.calls.http_call import CALLER, Caller
from octavo.frontend.calls.services import Tenants

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)

ABSENT_S = 60.0
"""How long a batch waits whose tenant the file does not name any more."""


class LineBudget:
    """The limits of the tenant of one batch.

    Args:
        tenants: of the server; None: it has none, and nothing is limited.
        name: of the tenant; None: the batch belongs to none, and nothing is limited.
    """

    def __init__(self, tenants: Tenants | None, name: str | None) -> None:
        self._tenants = tenants
        self._name = name
        self._caller: Caller | None = None
        """The tenant as of the latest request."""

    def max_in_flight(self, limit: int) -> int:
        """Return the limit on concurrent requests: at most `limit`, and at most the tenant's."""
        tenant = None if self._tenants is None or self._name is None else self._tenants.file.named(self._name)
        return limit if tenant is None else min(limit, tenant.max_concurrent_requests or limit)

    def begin(self) -> float:
        """Count a request that starts; return in how many seconds to try again if it must not, else 0."""
        if self._tenants is None or self._name is None:
            return 0.0
        if (tenant := self._tenants.file.named(self._name)) is None:
            logger.warning("a batch waits, because --tenants does not name its tenant %r any more", self._name)
            return ABSENT_S
        if (rejected := self._tenants.usage.begin(tenant, is_retried=True)) is not None:
            return float(rejected.retry_after_s)
        self._caller = Caller(tenant, self._tenants.usage)
        return 0.0

    def end(self) -> None:
        """Count the end of a request that has started."""
        if self._caller is not None:
            self._caller.usage.end(self._caller.tenant)

    def for_tenant(self, app: "ASGIApp") -> "ASGIApp":
        """Return an application that answers as if the tenant had sent each request."""

        def answer(scope: "Scope", receive: "Receive", send: "Send") -> Awaitable[None]:
            if self._caller is not None:
                scope[CALLER] = self._caller
            return app(scope, receive, send)

        return answer
