"""ASGI middleware that records calls: `CallMiddleware` outside the check of API keys, `TenantLimits` inside it."""

import time
from collections.abc import Awaitable
from functools import partial
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.frontend.calls.http_call import HttpCall
from octavo.frontend.calls.services import CallServices, Tenants
from octavo.frontend.http.errors import rejection
from octavo.frontend.http.request import header_value
from octavo.frontend.metrics.call import CURRENT_CALL
from octavo.frontend.tenants.file import Tenant

_FREE_PATHS = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
_CANCELLABLE = ("/v1/responses/", "/v1/batches/")

_STATUS_CLIENT_CLOSED = 499
"""Status of a request whose client disconnected before the response began, as in other servers' logs."""


class CallMiddleware:
    """Creates a call for each HTTP request, and logs it at its end.

    Args:
        app: the application.
        services: the services that record calls.
    """

    def __init__(self, app: ASGIApp, services: CallServices) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = HttpCall(scope, self._services.tracer)
        CURRENT_CALL.set(call)  # the server runs each request in its own task
        client, agent, now_s = scope.get("client"), header_value(scope, b"user-agent"), time.time()

        def send_and_record_status(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                call.status = message["status"]
            return send(message)

        try:
            await self._app(scope, receive, send_and_record_status)
        finally:
            if (log := self._services.access_log) is not None:
                has_tokens = bool(call.finish_reasons)
                fields = {
                    "request_id": call.request_id,
                    "client": client[0] if client else None,
                    "tenant": call.tenant.name if call.tenant else None,
                    "method": scope["method"],
                    "path": call.path,
                    "status": call.status or _STATUS_CLIENT_CLOSED,
                    "duration_s": round(time.monotonic() - call.started_s, 6),
                    "first_token_s": None if call.first_token_s is None else round(call.first_token_s, 6),
                    "prompt_tokens": call.num_prompt_tokens if has_tokens else None,
                    "cached_tokens": call.num_cached_tokens if has_tokens else None,
                    "completion_tokens": call.num_generation_tokens if has_tokens else None,
                    "finish_reasons": call.finish_reasons or None,
                    "user_agent": agent or None,
                }
                log.write(call.path, now_s, fields)


class TenantLimits:
    """Rejects requests of tenants that have reached a limit, and counts all other requests.

    Args:
        app: receives the accepted requests.
        tenants: the tenants with their usage.
    """

    def __init__(self, app: ASGIApp, tenants: Tenants) -> None:
        self._app = app
        self._usage = tenants.usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or pass it on."""
        call = HttpCall.of(scope)
        if call is None or (tenant := call.tenant) is None or scope["method"] != "POST" or _is_free(call.path):
            await self._app(scope, receive, send)
            return
        if (rejected := self._usage.begin(tenant)) is not None:
            message = (
                f"tenant {tenant.name!r} has reached its limit {rejected.reason} of "
                f"{getattr(tenant, rejected.reason)}: try again in {rejected.retry_after_s} s"
            )
            headers = {"retry-after": str(rejected.retry_after_s)}
            await rejection(HTTPStatus.TOO_MANY_REQUESTS, message, headers, scope)(scope, receive, send)
            return
        call.usage = self._usage
        call.on_end = partial(self._usage.end, tenant)
        try:
            await self._app(scope, receive, send)
        finally:
            call.on_end()  # does nothing for a request that continues in the background


def _is_free(path: str) -> bool:
    """Return whether a POST request causes no work for the engine."""
    return path in _FREE_PATHS or (path.endswith("/cancel") and path.startswith(_CANCELLABLE))


def set_tenant(scope: Scope, tenant: Tenant) -> None:
    """Record the tenant whose key a request has."""
    call = HttpCall.of(scope)
    assert call is not None, "tenants come with calls"
    call.tenant = tenant
