"""`run_headless`: an engine for applications that join it (`octavo serve --headless`).

This process owns the engine: it restarts the core after a failure and drains all requests at shutdown. It serves no
HTTP and sends no requests itself.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Sequence

import uvloop

from octavo.frontend.client import AsyncClient
from octavo.frontend.hosting import addresses_of, prepare_process, restarts, starting, stop_signals, watching
from octavo.frontend.launch import LaunchedEngine
from octavo.frontend.spawn import SpawnedEngine
from octavo.protocol.config import EngineConfig, ServerConfig
from octavo.protocol.errors import EngineDeadError
from octavo.protocol.supervise import ChildExited

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""Interval, in seconds, between checks that the engine is alive."""


def run_headless(engines: Sequence[SpawnedEngine], config: ServerConfig, reread: Callable[[], EngineConfig]) -> None:
    """Run engines until a signal arrives or one of them dies.

    Blocks until: all engines have exited.

    Args:
        engines: already spawned; stopped here.
        config: supplies the address and the timeouts.
        reread: reads the engine's configuration again, for `RESTART_SIGNAL`.

    Raises:
        StartupError: an engine could not start. The error names the root cause.
        EngineDeadError: an engine died, possibly while draining. The error names the root cause.
        Interrupted: a signal arrived before the engines were ready.
    """
    prepare_process()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_host(engines, config, reread))


async def _host(spawned: Sequence[SpawnedEngine], config: ServerConfig, reread: Callable[[], EngineConfig]) -> None:
    async with starting(spawned) as client:
        stop_requests = asyncio.Semaphore(0)

        def on_signal(number: signal.Signals) -> None:
            stop_requests.release()
            logger.info("%s", number.name)

        with stop_signals(on_signal):
            with restarts(client.restart, reread), watching(client, config.watchdog_timeout):
                logger.info(
                    "headless: serving %s at %s, without HTTP",
                    ", ".join(client.facts.served_model_names),
                    addresses_of(client, config),
                )
                await _wait_for_signal(client, stop_requests)
            processes = [engine.process for engine in client.engines if engine.process]
            await _drain(processes, config.shutdown_timeout, stop_requests)
            await client.close()  # inside `stop_signals`: another signal must not interrupt this


async def _wait_for_signal(client: AsyncClient, stop_requests: asyncio.Semaphore) -> None:
    """Wait for a stop signal.

    Raises:
        EngineDeadError: the engine died and will not be restarted.
    """
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop_requests.acquire(), TICK_S)
            return
        if client.failure:
            raise client.failure


async def _drain(engines: Sequence[LaunchedEngine], timeout_s: float, stop_requests: asyncio.Semaphore) -> None:
    """Drain the engines until the timeout or a second signal; abort the requests that remain.

    Raises:
        EngineDeadError: an engine died meanwhile or was already dead.
    """
    logger.info(
        "draining: no new requests; waiting up to %g s for running requests (signal again to abort them)", timeout_s
    )
    draining = asyncio.create_task(_drained(engines), name="engines: drain")
    second_signal = asyncio.create_task(stop_requests.acquire(), name="second signal")
    await asyncio.wait([draining, second_signal], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        logger.warning("%s: aborting the remaining requests", "second signal" if second_signal.done() else "timeout")
    for task in (draining, second_signal):
        task.cancel()  # no effect on a finished task
    if not draining.done():
        return
    for exited in draining.result():
        if exited is None:
            raise EngineDeadError("the engine died and had not restarted yet: its waiting requests are lost")
        if exited.code:
            raise EngineDeadError(f"{exited} while draining: its requests are lost")


async def _drained(engines: Sequence[LaunchedEngine]) -> list[ChildExited | None]:
    return await asyncio.gather(*(engine.drain() for engine in engines))
