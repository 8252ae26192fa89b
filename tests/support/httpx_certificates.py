"""Reads the system's certificates once: httpx reads them for every client and every `httpx.get`, in 70 ms."""

import functools
import ssl
from typing import Any

import httpx._transports.default as transports


def share_certificates() -> None:
    """Give all clients of this process that do not configure certificates the same SSL context."""
    create = transports.create_ssl_context
    shared = functools.cache(create)

    def create_ssl_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
        return shared() if (verify, cert, trust_env) == (True, None, True) else create(verify, cert, trust_env)

    transports.create_ssl_context = create_ssl_context
