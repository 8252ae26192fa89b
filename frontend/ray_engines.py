"""`RayEngines`: engines as actors on the nodes of a Ray cluster (`--data-parallel-backend ray`).

An actor owns an engine like any other application: it starts the core and restarts it. The server joins the engines by
tcp with keys; requests do not pass through Ray. When a node is lost, the other engines continue its requests, Ray
restarts the actor elsewhere, and the server follows it to its new address.
"""

import asyncio
import contextlib
import logging
import os
import socket
from typing import Any

import msgspec

from octavo.frontend.client import AsyncClient
from octavo.frontend.engine_connection import join_engine
from octavo.frontend.link import CoreLink
from octavo.frontend.run_dir import RunDir
from octavo.protocol.config import EngineConfig, RemoteConfig
from octavo.protocol.config.lock_step import check_lock_step
from octavo.protocol.curve import GroupKeys
from octavo.protocol.env import Env
from octavo.protocol.errors import OctavoError, StartupError
from octavo.protocol.ray_cluster import connect_to_ray, node_name

logger = logging.getLogger(__name__)

RECONNECT_TIMEOUT_S = 1800.0
"""Seconds that requests wait, if there is no other engine, until Ray has found a node."""
CONNECT_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
_RETRY_S = 1.0
_POLL_S = 1.0


class Started(msgspec.Struct, frozen=True):
    """Result of an attempt to start an engine."""

    address: str = ""
    node: str = ""
    error: str = ""
    hint: str = ""


class RayEngines:
    """The engines of one server.

    Args:
        config: configuration of all engines.

    Raises:
        ConfigError: Ray is not installed.
        StartupError: there is no cluster.
    """

    def __init__(self, config: EngineConfig) -> None:
        check_lock_step(config.parallel, "cpu", config.device.cpu_kernels)
        self._ray = ray = connect_to_ray()
        self._keys = GroupKeys.create()
        parallel = config.parallel
        self._config = msgspec.structs.replace(
            config, parallel=msgspec.structs.replace(parallel, data_parallel_size=1, data_parallel_backend="mp")
        )
        bundle = _bundle(config, has_gpus=ray.cluster_resources().get("GPU", 0) > 0)
        self._group = ray.util.placement_group([bundle] * parallel.data_parallel_size, strategy="SPREAD")
        actor_class = ray.remote(EngineActor)
        self._actors = [
            actor_class.options(
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0.0),
                max_restarts=-1,
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=index
                ),
            ).remote()
            for index in range(parallel.data_parallel_size)
        ]
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> AsyncClient:
        """Start the engines and join them.

        Raises:
            StartupError: an engine could not start. The error names the root cause.
        """
        logger.info("starting %d engines on the nodes of a Ray cluster", len(self._actors))
        started = await asyncio.gather(*(self._start(actor) for actor in self._actors))
        for index, engine in enumerate(started):
            if engine.error:
                raise StartupError(engine.error, hint=engine.hint).of(f"engine {index}")
            logger.info("engine %d is at %s on node %s", index, engine.address, engine.node)
        connections = [
            await join_engine(
                engine.address,
                keys=self._keys.client,
                reconnect_timeout_s=RECONNECT_TIMEOUT_S,
                connect_timeout_s=CONNECT_TIMEOUT_S,
            )
            for engine in started
        ]
        for index, connection in enumerate(connections):
            watch = self._keep(index, self._actors[index], connection.link)
            self._watching.append(asyncio.create_task(watch, name=f"engine {index}: Ray"))
        return AsyncClient(*connections)

    async def close(self) -> None:
        """Stop the engines. Waits until: they have stopped, for at most `STOP_TIMEOUT_S`."""
        for watch in self._watching:
            watch.cancel()
        stopping = [asyncio.ensure_future(_result(actor.stop.remote())) for actor in self._actors]
        await asyncio.wait(stopping, timeout=STOP_TIMEOUT_S)
        for task in stopping:
            task.cancel()
        with contextlib.suppress(self._ray.exceptions.RayError):
            for actor in self._actors:
                self._ray.kill(actor)
            self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()

    async def _start(self, actor: Any) -> Started:
        encoded = await _result(actor.start.remote(msgspec.msgpack.encode(self._config), self._keys.secret))
        return msgspec.msgpack.decode(encoded, type=Started)

    async def _keep(self, index: int, actor: Any, link: CoreLink) -> None:
        """Restart an engine whenever it is gone, and follow it to its new node."""
        errors = self._ray.exceptions.RayError
        while True:
            try:
                cause = await _result(actor.wait.remote())
            except errors as error:
                cause = " ".join(str(error).split())
            logger.warning("lost engine %d: %s. Ray restarts it when a node has room", index, cause)
            while True:
                await asyncio.sleep(_RETRY_S)
                try:
                    engine = await self._start(actor)
                except errors as error:
                    logger.debug("engine %d does not start yet: %s", index, error)
                    continue
                if not engine.error:
                    break
                logger.error("engine %d does not start: %s", index, engine.error)
            logger.info("engine %d is at %s on node %s", index, engine.address, engine.node)
            link.move_to(engine.address)


class EngineActor:
    """Owns an engine on a node of the cluster, in a Ray process."""

    def __init__(self) -> None:
        self._client: AsyncClient | None = None
        self._address = ""
        # If this process is killed, later engines delete the directory.
        self._directory = RunDir(Env.read().runtime_dir)

    async def start(self, encoded: bytes, secret: bytes) -> bytes:
        """Start the engine, unless it runs; return an encoded `Started`."""
        if self._client and self._client.failure:
            await self._client.close()
            self._client = None
        if self._client is None:
            config = msgspec.msgpack.decode(encoded, type=EngineConfig)
            address = f"tcp://{_node_address()}:{_free_port()}"
            try:
                self._client = await AsyncClient.launch(
                    config=msgspec.structs.replace(config, remote=self._write_keys(secret)), address=address
                )
            except OctavoError as error:
                hint = error.hint if isinstance(error, StartupError) else ""
                return msgspec.msgpack.encode(Started(error=str(error), hint=hint))
            self._address = address
        return msgspec.msgpack.encode(Started(address=self._address, node=node_name()))

    async def wait(self) -> str:
        """Wait until the engine is gone for good, and return the cause."""
        while self._client and not self._client.failure:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return str(self._client.failure) if self._client else "it was not started"

    async def stop(self) -> None:
        """Stop the engine; its requests must have ended."""
        if self._client:
            await self._client.close()
        self._directory.remove()

    def _write_keys(self, secret: bytes) -> RemoteConfig:
        """Write the keys to files of the engine that only this user can read."""
        keys = GroupKeys(secret)
        directory = self._directory.path
        secret_file, client_file = directory / "engine.key_secret", directory / "client.key"
        for path, kind, key in ((secret_file, "secret", secret), (client_file, "public", keys.client.public)):
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(f'curve\n    {kind}-key = "{key.decode()}"\n')
        return RemoteConfig(engine_secret_key_file=str(secret_file), engine_authorized_clients=str(client_file))


def _bundle(config: EngineConfig, *, has_gpus: bool) -> dict[str, float]:
    """Return the Ray resources of an engine's actor."""
    parallel = config.parallel
    if parallel.distributed_executor_backend == "ray":
        return {"CPU": 1.0}  # its workers have bundles of their own
    num_workers = parallel.world_size
    bundle = {"CPU": float((config.device.num_threads or 1) * num_workers)}
    if config.device.device == "cuda" or (config.device.device == "auto" and has_gpus):
        bundle["GPU"] = float(num_workers)
    return bundle


async def _result(reference: Any) -> Any:
    return await reference


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_node_address(), 0))
        return int(probe.getsockname()[1])
