"""`EngineConnection`: a connection to an engine that this process starts or joins. It sends no requests."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import zmq

from octavo.frontend.engine_configs import read_config
from octavo.frontend.launch import LaunchedEngine, ProgressCallback, follow_start
from octavo.frontend.link import CoreLink
from octavo.frontend.recovery.downtime import ReconnectPolicy
from octavo.frontend.recovery.replacement import require_same_bits, require_same_model
from octavo.frontend.spawn import SpawnedEngine, spawn_engines
from octavo.frontend.text.chat_template import ChatTemplate
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.frontend.timeline import Timeline
from octavo.protocol.config import EngineConfig, ModelFacts, ResolvedConfig
from octavo.protocol.curve import ClientKeys
from octavo.protocol.errors import EngineDeadError, InvalidRequestError, StartupError

CONNECT_TIMEOUT_S = 10.0
CONNECT_AGAIN_S = 0.1
"""Delay before the next attempt after a core died before it answered."""

RECONNECT_TIMEOUT_S = 120.0
"""Seconds to wait for an engine of another process to come back after it died."""


@dataclass(frozen=True)
class EngineConnection:
    """A core that answers, and everything needed to communicate with it."""

    link: CoreLink
    tokenizer: Tokenizer
    context: "zmq.Context[zmq.Socket[bytes]]"
    engine: LaunchedEngine | None
    """The engine's process if we started it, otherwise `None`."""

    async def close(self) -> None:
        """Disconnect, and stop the engine if we started it. Idempotent."""
        try:
            await self.link.close()
        finally:
            if self.engine:
                await self.engine.stop()
        self.context.term()


async def launch_engines(
    config: EngineConfig, address: str | None, on_progress: ProgressCallback | None
) -> list[EngineConnection]:
    """Start the engines of a configuration and join them.

    Args:
        config: configuration of all engines.
        address: on which other applications can join the first engine; `addresses_of_engines` derives the addresses of
            the others. `None`: private addresses.
        on_progress: called with the engines' progress while they start.

    Raises:
        StartupError: an engine could not start. The error names the root cause; all of the engines were stopped.
    """
    timeline = Timeline()
    resolved = await asyncio.to_thread(read_config, config, timeline)
    # Spawn on this thread: a core dies with the thread that spawned it.
    return await follow_engines(spawn_engines(resolved, timeline, address), on_progress)


async def follow_engines(
    spawned: Sequence[SpawnedEngine], on_progress: ProgressCallback | None
) -> list[EngineConnection]:
    """Wait for engines that were spawned on this thread, and join them.

    Raises:
        StartupError: an engine could not start. The error names the root cause; all of the engines were stopped.
    """
    following = [asyncio.create_task(_follow_one_of(spawned, index, on_progress)) for index in range(len(spawned))]
    return await _all_or_none(following)


async def _follow_one_of(
    spawned: Sequence[SpawnedEngine], index: int, on_progress: ProgressCallback | None
) -> EngineConnection:
    try:
        return await follow_engine(spawned[index], on_progress)
    except StartupError as error:
        raise (error if len(spawned) == 1 else error.of(f"engine {spawned[index].config.engine_index}")) from error


async def join_engines(
    addresses: Sequence[str], *, reconnect_timeout_s: float, keys: ClientKeys | None, connect_timeout_s: float
) -> list[EngineConnection]:
    """Join running engines of the same model. See `join_engine`.

    Raises:
        StartupError: an engine does not answer.
        ConfigError: the engines serve different models.
    """
    joining = [
        asyncio.create_task(
            join_engine(
                address, reconnect_timeout_s=reconnect_timeout_s, keys=keys, connect_timeout_s=connect_timeout_s
            )
        )
        for address in addresses
    ]
    connections = await _all_or_none(joining)
    try:
        configs = [msgspec.msgpack.decode(one.link.facts.config, type=ResolvedConfig) for one in connections]
        require_same_model(dict(zip(addresses, configs, strict=True)))
        require_same_bits(
            {address: one.link.facts.identity for address, one in zip(addresses, connections, strict=True)}
        )
    except BaseException:
        await asyncio.gather(*(connection.close() for connection in connections))
        raise
    return connections


async def _all_or_none(connecting: Sequence["asyncio.Task[EngineConnection]"]) -> list[EngineConnection]:
    """Return all connections; if one fails, close the others."""
    try:
        return list(await asyncio.gather(*connecting))
    except BaseException:
        for task in connecting:
            task.cancel()
        for result in await asyncio.gather(*connecting, return_exceptions=True):
            if isinstance(result, EngineConnection):
                await result.close()
        raise


async def follow_engine(spawned: SpawnedEngine, on_progress: ProgressCallback | None) -> EngineConnection:
    """Wait for an engine that was spawned on this thread, and join it.

    Raises:
        StartupError: the engine could not start, and was stopped. The error names the root cause.
    """
    start = time.monotonic()
    try:
        tokenizer = await asyncio.to_thread(_load_tokenizer, spawned.config)
    except BaseException:
        spawned.end()
        raise
    spawned.timeline.add("Frontend", "loading the tokenizer", time.monotonic() - start)
    engine = await follow_start(spawned, on_progress)
    try:
        return await join_engine(engine.address, engine, tokenizer)
    except BaseException:
        await engine.stop()
        raise


async def join_engine(
    address: str,
    engine: LaunchedEngine | None = None,
    tokenizer: Tokenizer | None = None,
    reconnect_timeout_s: float = RECONNECT_TIMEOUT_S,
    keys: ClientKeys | None = None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
) -> EngineConnection:
    """Join a running engine.

    Args:
        address: address of its core.
        engine: its process, if we started it.
        tokenizer: tokenizer of its model. `None`: loaded here.
        reconnect_timeout_s: seconds to wait for the engine to come back after it died; ignored if we started it.
        keys: for a `tcp://` address on another machine.
        connect_timeout_s: seconds to wait for the first answer; the engine may be restarting.

    Raises:
        StartupError: no engine answers on `address`.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        link = await connect_to_core(context, address, connect_timeout_s, keys)
        try:
            config = msgspec.msgpack.decode(link.facts.config, type=ResolvedConfig)
            if config.recovery.restart_core:
                link.reconnect_policy = ReconnectPolicy(
                    None if engine else reconnect_timeout_s, config.max_num_queued_reqs
                )
            if tokenizer is None:
                tokenizer = await asyncio.to_thread(model_tokenizer, config.model)
            return EngineConnection(link, tokenizer, context, engine)
        except BaseException:
            await link.close()
            raise
    except BaseException:
        context.destroy(linger=0)  # unlike term(), this does not block on a socket that was left open
        raise


async def connect_to_core(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, timeout_s: float, keys: ClientKeys | None
) -> CoreLink:
    """Connect to a core, or to its successor if the core dies before it answers.

    Raises:
        StartupError: no core answered in time.
        EngineDeadError: the last core died and no time was left.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return await CoreLink.connect(context, address, max(0.0, deadline - time.monotonic()), keys)
        except EngineDeadError:
            if time.monotonic() + CONNECT_AGAIN_S > deadline:
                raise
        await asyncio.sleep(CONNECT_AGAIN_S)


def model_tokenizer(model: ModelFacts) -> Tokenizer:
    """Return the tokenizer of a model, or one that rejects text if the engine runs without a tokenizer.

    Raises:
        ConfigError: the tokenizer cannot be read.
    """
    if model.tokenizer_path is None:
        return Tokenizer.absent()
    return Tokenizer.load(model.tokenizer_path, model.tokenizer_mode)


def _load_tokenizer(config: ResolvedConfig) -> Tokenizer:
    """Load the tokenizer. Its chat template is compiled now, while the engine loads."""
    tokenizer = model_tokenizer(config.model)
    with contextlib.suppress(InvalidRequestError):  # a model need not have a chat template
        ChatTemplate.for_model(config.chat_template, tokenizer)
    return tokenizer
