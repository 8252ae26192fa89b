"""What a process does that owns an engine, with an HTTP server before it or without: its start, its signals, its log.

Serves nobody, and keeps no engine alive: that is `AsyncClient`'s.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator

from octavo.frontend.client import AsyncClient
from octavo.frontend.connection import RECONNECT_TIMEOUT_S
from octavo.frontend.metrics.log_line import INTERVAL_S, ThroughputLine
from octavo.frontend.spawn import SpawnedEngine
from octavo.frontend.stall_watch import StallWatch
from octavo.protocol.config import EngineConfig, ServerConfig
from octavo.protocol.env import set_default
from octavo.protocol.errors import OctavoError, StartupError
from octavo.protocol.stacks import enable_dumps

logger = logging.getLogger(__name__)

RESTART_SIGNAL = signal.SIGUSR2
"""Asks for a new engine: with new weights, or with what the file behind --config says by now."""


class Interrupted(Exception):
    """A signal ended the start before the engine, or the server before it, was ready."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"{number.name} while starting")
        self.number = number


def prepare_process() -> None:
    """Set what must be set before there is an event loop, or a tokenizer."""
    enable_dumps()
    # One that comes too early, or when the process ends, must not kill it: that is what the system would do.
    signal.signal(RESTART_SIGNAL, signal.SIG_IGN)
    # Prompts are tokenized one by one as they come; more threads for each would only be in the workers' way.
    set_default("TOKENIZERS_PARALLELISM", "false")


@contextlib.asynccontextmanager
async def starting(engine: SpawnedEngine) -> AsyncIterator[AsyncClient]:
    """Wait for the engine; a signal meanwhile stops the start."""
    with interruptible():
        client = await AsyncClient.follow(engine, on_progress=_log_progress)
    try:
        if client.engine:
            logger.info("%s", client.engine.timeline.render())
        yield client
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def joining(config: ServerConfig) -> AsyncIterator[AsyncClient]:
    """Join the engine that a server's configuration names; a signal meanwhile stops that."""
    address = config.join or ""
    logger.info("joining the engine at %s, for which it waits %g s at most", address, RECONNECT_TIMEOUT_S)
    with interruptible():
        client = await join_named(address, config)
    async with client:
        yield client


async def join_named(address: str, config: ServerConfig) -> AsyncClient:
    """Join an engine with a server's keys. It may be on its way, or between two lives.

    Raises:
        StartupError: no engine answers on `address`.
    """
    return await AsyncClient.connect(
        address,
        connect_timeout_s=RECONNECT_TIMEOUT_S,
        client_secret_key_file=config.client_secret_key_file,
        engine_public_key_file=config.engine_public_key_file,
    )


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let a signal end what is being waited for.

    Raises:
        Interrupted: it did.
    """
    task = asyncio.current_task()
    assert task is not None
    received: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    try:
        with stop_signals(on_signal):
            yield
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(received[0]) from None


@contextlib.contextmanager
def restarts(client: AsyncClient, reread: Callable[[], EngineConfig]) -> Iterator[None]:
    """Start the engine anew, with its configuration as it is said by then, whenever `RESTART_SIGNAL` comes."""
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def on_signal() -> None:
        if tasks:
            logger.warning("%s: the engine is being started anew already", RESTART_SIGNAL.name)
            return
        task = asyncio.create_task(_restart(client, reread), name="engine: restart")
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_signal_handler(RESTART_SIGNAL, on_signal)
    try:
        yield
    finally:
        loop.remove_signal_handler(RESTART_SIGNAL)
        signal.signal(RESTART_SIGNAL, signal.SIG_IGN)
        for task in tasks:
            task.cancel()


async def _restart(client: AsyncClient, reread: Callable[[], EngineConfig]) -> None:
    logger.info("%s: starting a core with the configuration as it is now", RESTART_SIGNAL.name)
    try:
        await client.restart(reread())
    except StartupError as error:
        hint = f" ({error.hint})" if error.hint else ""
        logger.error("the engine goes on as it is, for the new one cannot start: %s%s", error.message, hint)
    except (OctavoError, OSError) as error:
        logger.error("the engine goes on as it is, for the new one cannot start: %s", error)


@contextlib.contextmanager
def stop_signals(handler: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Have `handler` called on the event loop with each SIGINT and SIGTERM."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, handler, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def watching(client: AsyncClient, stall_s: float) -> Iterator[None]:
    """Write to the log what the engine does, and what all processes do when it has stalled for `stall_s` seconds."""
    watch = StallWatch(lambda: client.health(stall_s))
    tasks = [asyncio.create_task(watch.run(), name="stall watch")]
    if client.config.log_stats:
        tasks.append(asyncio.create_task(_log_throughput(client), name="throughput line"))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def _log_throughput(client: AsyncClient) -> None:
    line = ThroughputLine(time.monotonic())
    while True:
        await asyncio.sleep(INTERVAL_S)
        if text := line.next(client.latest_stats, time.monotonic()):
            logger.info("%s", text)


def _log_progress(phase: str, fraction: float | None) -> None:
    if fraction is None:
        logger.info("%s", phase)
    else:
        logger.debug("%s: %.0f %%", phase, 100 * fraction)
