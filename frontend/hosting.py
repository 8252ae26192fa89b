"""The parts of `octavo serve` that do not depend on HTTP: starting or joining engines, signals, periodic log lines.

It serves no requests. `AsyncClient` restarts an engine after a failure.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial

from octavo.frontend.client import AsyncClient
from octavo.frontend.engine_configs import addresses_of_engines
from octavo.frontend.engine_connection import RECONNECT_TIMEOUT_S, EngineConnection, join_engine
from octavo.frontend.load_bar import LoadBar
from octavo.frontend.membership.messages import EngineEntry
from octavo.frontend.metrics.log_line import INTERVAL_S, ThroughputLine
from octavo.frontend.spawn import SpawnedEngine
from octavo.frontend.stall_watch import StallWatch
from octavo.protocol.config import EngineConfig, ServerConfig
from octavo.protocol.curve import read_client_keys
from octavo.protocol.env import set_default
from octavo.protocol.errors import OctavoError, StartupError
from octavo.protocol.lifecycle import adopt_orphans
from octavo.protocol.stacks import enable_dumps

logger = logging.getLogger(__name__)

RESTART_SIGNAL = signal.SIGUSR2
"""Requests a new core, which reads the weights and the --config file again."""


class Interrupted(Exception):
    """A signal arrived before the engine or the HTTP server was ready."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"{number.name} while starting")
        self.number = number


def prepare_process() -> None:
    """Configure the process before an event loop or a tokenizer is created."""
    enable_dumps()
    adopt_orphans()
    # The default action would kill the process if the signal arrives during start-up or shutdown.
    signal.signal(RESTART_SIGNAL, signal.SIG_IGN)
    # Prompts are tokenized one at a time; tokenizer threads would only compete with the workers for cores.
    set_default("TOKENIZERS_PARALLELISM", "false")


@contextlib.asynccontextmanager
async def starting(engines: Sequence[SpawnedEngine]) -> AsyncIterator[AsyncClient]:
    """Wait for the engines to be ready, and yield a client of them. A signal meanwhile cancels the start."""
    with interruptible(), LoadBar() as bar:
        client = await AsyncClient.follow(engines, on_progress=partial(_show_progress, bar))
    try:
        if client.engine:
            logger.info("%s", client.engine.timeline.render())
        yield client
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def joining(config: ServerConfig) -> AsyncIterator[list[AsyncClient]]:
    """Join the engines named in the server's configuration, and yield one client per model. A signal cancels this."""
    clients: list[AsyncClient] = []
    async with contextlib.AsyncExitStack() as stack:
        with interruptible():
            for address in config.join or ():
                logger.info("joining the engine at %s, waiting up to %g s", address, RECONNECT_TIMEOUT_S)
                clients.append(await stack.enter_async_context(await join_named(address, config)))
        yield clients


async def join_named(address: str, config: ServerConfig) -> AsyncClient:
    """Join an engine with the server's keys. The engine may still be starting or restarting.

    Raises:
        StartupError: no engine answers on `address`.
    """
    return await AsyncClient.connect(
        address,
        connect_timeout_s=RECONNECT_TIMEOUT_S,
        client_secret_key_file=config.client_secret_key_file,
        engine_public_key_file=config.engine_public_key_file,
    )


def addresses_of(client: AsyncClient, config: ServerConfig) -> str:
    """Return the addresses at which other applications can join the engines, separated by commas."""
    if not config.engine_address:
        return client.address
    return ",".join(addresses_of_engines(config.engine_address, len(client.engines)))


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Cancel the body of the `with` statement on SIGINT or SIGTERM.

    Raises:
        Interrupted: a signal arrived.
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


async def join_entry(entry: EngineEntry, config: ServerConfig) -> EngineConnection:
    """Join an engine that was announced by the first HTTP process or an operator, with the server's keys.

    Raises:
        StartupError: no engine answers at its address.
    """
    keys = read_client_keys(config.client_secret_key_file, entry.public_key_file or config.engine_public_key_file)
    return await join_engine(entry.address, keys=keys, connect_timeout_s=RECONNECT_TIMEOUT_S)


@contextlib.contextmanager
def restarts(restart: Callable[[EngineConfig], Awaitable[None]], reread: Callable[[], EngineConfig]) -> Iterator[None]:
    """Inside the `with` statement, replace the engine's core on each `RESTART_SIGNAL`, with the configuration read
    again.
    """
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def on_signal() -> None:
        if tasks:
            logger.warning("%s ignored: a restart is already in progress", RESTART_SIGNAL.name)
            return
        task = asyncio.create_task(_restart(restart, reread), name="engine: restart")
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


async def _restart(restart: Callable[[EngineConfig], Awaitable[None]], reread: Callable[[], EngineConfig]) -> None:
    logger.info("%s: starting a new core with the current configuration", RESTART_SIGNAL.name)
    try:
        await restart(reread())
    except StartupError as error:
        hint = f" ({error.hint})" if error.hint else ""
        logger.error("a new core cannot start, and its engine continues unchanged: %s%s", error.message, hint)
    except (OctavoError, OSError) as error:
        logger.error("a new core cannot start, and its engine continues unchanged: %s", error)


@contextlib.contextmanager
def stop_signals(handler: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Inside the `with` statement, call `handler` on the event loop for each SIGINT and SIGTERM."""
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
def watching(client: AsyncClient, stall_s: float, prefix: str = "") -> Iterator[None]:
    """Log throughput, and the stacks of all processes when an engine stalls.

    Args:
        client: client of the engines.
        stall_s: seconds that an engine may have work without finishing a step.
        prefix: starts each line; names the model if there are several.
    """
    watch = StallWatch(lambda: client.engine_set.health(stall_s), prefix)
    tasks = [asyncio.create_task(watch.run(), name="stall watch")]
    if client.config.log_stats:
        tasks.append(asyncio.create_task(_log_throughput(client, prefix), name="throughput line"))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def _log_throughput(client: AsyncClient, prefix: str) -> None:
    line = ThroughputLine(time.monotonic())
    while True:
        await asyncio.sleep(INTERVAL_S)
        if text := line.next(client.stats_by_engine(), time.monotonic()):
            logger.info("%s%s", prefix, text)


def _show_progress(bar: LoadBar, phase: str, fraction: float | None) -> None:
    bar(phase, fraction)
    if fraction is None:
        logger.info("%s", phase)
    else:
        logger.debug("%s: %.0f %%", phase, 100 * fraction)
