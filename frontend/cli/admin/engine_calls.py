"""Utility calls of a command to an engine, over a separate connection."""

import asyncio
from collections.abc import Sequence

import zmq

from octavo.frontend.link import CoreLink
from octavo.protocol.curve import ClientKeys
from octavo.protocol.events import UtilityResult
from octavo.protocol.requests import Utility

TIMEOUT_S = 10.0
"""Timeout in seconds of the connection, and of each call."""


def call_engine(address: str, keys: ClientKeys | None, utilities: Sequence[Utility]) -> list[UtilityResult]:
    """Make calls one after another, and return their results.

    Raises:
        OctavoError: the engine does not respond, or a call failed.
    """
    return asyncio.run(_call(address, keys, utilities))


async def _call(address: str, keys: ClientKeys | None, utilities: Sequence[Utility]) -> list[UtilityResult]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        link = await CoreLink.connect(context, address, TIMEOUT_S, keys)
        try:
            return [await link.call(utility, TIMEOUT_S) for utility in utilities]
        finally:
            await link.close()
    finally:
        context.term()
