"""`run_headless`: an engine for applications that join it (`octavo serve --headless`), from start to end.

It owns the engine: starts its core again when that dies, and lets it finish everybody's requests at the end. It serves
no HTTP, and asks for nothing itself.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable

import uvloop

from octavo.frontend.client import AsyncClient
from octavo.frontend.hosting import prepare_process, restarts, starting, stop_signals, watching
from octavo.frontend.launch import LaunchedEngine
from octavo.frontend.spawn import SpawnedEngine
from octavo.protocol.config import EngineConfig, ServerConfig
from octavo.protocol.errors import EngineDeadError

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""How often it looks whether the engine still lives."""


def run_headless(engine: SpawnedEngine, config: ServerConfig, reread: Callable[[], EngineConfig]) -> None:
    """Keep an engine until a signal or its death.

    Blocks until: the engine has ended.

    Args:
        engine: on its way already; ended here.
        config: for its address and its time-outs.
        reread: returns the engine's configuration as it is said now, for `RESTART_SIGNAL`.

    Raises:
        StartupError: the engine cannot start; holds the root cause.
        EngineDeadError: the engine died, with the root cause; also while it drained, or just before.
        Interrupted: a signal came before it was ready.
    """
    prepare_process()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_host(engine, config, reread))


async def _host(spawned: SpawnedEngine, config: ServerConfig, reread: Callable[[], EngineConfig]) -> None:
    async with starting(spawned) as client:
        assert client.engine is not None, "it was started here"
        told = asyncio.Semaphore(0)

        def on_signal(number: signal.Signals) -> None:
            told.release()
            logger.info("%s", number.name)

        with stop_signals(on_signal):
            with restarts(client, reread), watching(client, config.watchdog_timeout):
                logger.info(
                    "no HTTP: %s is at %s for applications that join it",
                    ", ".join(client.facts.served_model_names),
                    config.engine_address or client.address,
                )
                await _wait_for_signal(client, told)
            await _drain(client.engine, config.shutdown_timeout, told)
            await client.close()  # while signals are heeded: a further one must not cut this short


async def _wait_for_signal(client: AsyncClient, told: asyncio.Semaphore) -> None:
    """Wait until told to stop.

    Raises:
        EngineDeadError: the engine has died for good meanwhile.
    """
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(told.acquire(), TICK_S)
            return
        if client.failure:
            raise client.failure


async def _drain(engine: LaunchedEngine, timeout_s: float, told: asyncio.Semaphore) -> None:
    """Let the engine finish, until time is up or a second signal comes; what it has not finished then is aborted.

    Raises:
        EngineDeadError: it died instead, or was dead already.
    """
    logger.info("no new requests; waiting up to %g s for those that run (once more to abort them)", timeout_s)
    draining = asyncio.create_task(engine.drain(), name="engine: drain")
    impatience = asyncio.create_task(told.acquire(), name="second signal")
    await asyncio.wait([draining, impatience], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        logger.warning("%s: aborting what still runs", "told again" if impatience.done() else "time is up")
    for task in (draining, impatience):
        task.cancel()  # of no effect on what is done
    if not draining.done():
        return
    exited = draining.result()
    if exited is None:
        raise EngineDeadError("the engine had died and was not there again yet: the requests that wait for it are lost")
    if exited.code:
        raise EngineDeadError(f"{exited} while it drained: its requests are lost")
