"""`LineBudget`: applies a tenant's limits to the requests of its batches."""

import logging
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from octavo.frontend.calls.http_call import CALLER, Caller
from octavo.frontend.calls.services import Tenants

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)

ABSENT_S = 60.0
"""Seconds that a batch waits whose tenant is missing in the tenants file."""


class LineBudget:
    """The limits of the tenant of one batch.

    Args:
        tenants: tenants of the server. `None`: nothing is limited.
        name: name of the tenant. `None`: the batch belongs to no tenant, and nothing is limited.
    """

    def __init__(self, tenants: Tenants | None, name: str | None) -> None:
        self._tenants = tenants
        self._name = name
        self._caller: Caller | None = None
        """The tenant, as read for the latest request."""

    def max_in_flight(self, limit: int) -> int:
        """Return the maximum number of concurrent requests: `limit`, or the tenant's limit if that is lower."""
        tenant = None if self._tenants is None or self._name is None else self._tenants.file.named(self._name)
        return limit if tenant is None else min(limit, tenant.max_concurrent_requests or limit)

    def begin(self) -> float:
        """Count the start of a request and return 0; if it must not start yet, return the seconds to wait."""
        if self._tenants is None or self._name is None:
            return 0.0
        if (tenant := self._tenants.file.named(self._name)) is None:
            logger.warning("a batch waits: add its tenant %r to the --tenants file again", self._name)
            return ABSENT_S
        if (rejected := self._tenants.usage.begin(tenant, is_retried=True)) is not None:
            return float(rejected.retry_after_s)
        self._caller = Caller(tenant, self._tenants.usage)
        return 0.0

    def end(self) -> None:
        """Count the end of a started request."""
        if self._caller is not None:
            self._caller.usage.end(self._caller.tenant)

    def for_tenant(self, app: "ASGIApp") -> "ASGIApp":
        """Return an application that handles each request as if the tenant had sent it."""

        def answer(scope: "Scope", receive: "Receive", send: "Send") -> Awaitable[None]:
            if self._caller is not None:
                scope[CALLER] = self._caller
            return app(scope, receive, send)

        return answer
