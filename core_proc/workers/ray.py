"""Nodes of a Ray cluster: one actor per rank, in a placement group. The only file of the core that imports Ray.

An actor runs a node agent whose child is the worker. So workers are the same processes as without Ray. Ray finds
machines with room, restarts an actor elsewhere when its machine is lost, and ends all actors when the core has ended.
Commands, plans and results do not pass through Ray.
"""

import logging
import threading
import time
from contextlib import suppress

import msgspec

from octavo.core_proc.workers.agent import NodeAgent
from octavo.core_proc.workers.agents import Agents
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.control import AgentSpec
from octavo.protocol.curve import GroupKeys
from octavo.protocol.ray_cluster import connect_to_ray, node_name

logger = logging.getLogger(__name__)

_WATCH_S = 1.0
_RETRY_S = 0.2


class RayNodes(Agents):
    """The agents of a placement group.

    Args:
        config: the workers' configuration.
        module: the module that each worker runs.

    Raises:
        ConfigError: Ray is not installed.
        StartupError: there is no cluster, or it can never have room for the workers.
    """

    def __init__(self, config: ResolvedConfig, module: str) -> None:
        self._ray = ray = connect_to_ray()
        super().__init__(
            f"tcp://{ray.util.get_node_ip_address()}:*", GroupKeys.create(), is_uniform=config.device == "cpu"
        )
        assert self.keys is not None
        bundle = {"CPU": float(config.num_threads), **({"GPU": 1.0} if config.device == "cuda" else {})}
        self._group = ray.util.placement_group([bundle] * config.world_size, strategy="PACK")
        # msgpack, so that Ray need not pickle our classes, whose versions may differ.
        spec = msgspec.msgpack.encode(
            AgentSpec(
                core_address=self.address,
                secret=self.keys.secret.decode(),
                node="",
                capacity=1,
                worker_module=module,
                log_level=logging.getLevelName(logging.getLogger("octavo").getEffectiveLevel()),
            )
        )
        actor_class = ray.remote(RankActor)
        self._actors = [
            actor_class.options(
                name=f"{self.address} rank actor {index}",
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0.0),
                max_restarts=-1,
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=index
                ),
            ).remote()
            for index in range(config.world_size)
        ]
        self._check_room(bundle, config.world_size)
        threading.Thread(target=self._watch, args=[spec], name="Ray actors", daemon=True).start()

    def missing(self, num_ranks: int) -> str:
        """See `Agents.missing`."""
        text = super().missing(num_ranks)
        return text and f"{text}; `ray status` lists the nodes and what they have free"

    def close(self) -> None:
        """See `Agents.close`."""
        if not self._is_closed:
            super().close()
            with suppress(self._ray.exceptions.RayError):
                for actor in self._actors:
                    self._ray.kill(actor)
                self._ray.util.remove_placement_group(self._group)
            self._ray.shutdown()

    def _check_room(self, bundle: dict[str, float], num_ranks: int) -> None:
        """Log which resources the cluster lacks. This is no error, because a cluster may grow."""
        total = self._ray.cluster_resources()
        for name, size in bundle.items():
            if total.get(name, 0.0) < size * num_ranks:
                logger.warning(
                    "%d workers need %g %s in all, and the Ray cluster has %g: waiting for nodes to join it",
                    num_ranks,
                    size * num_ranks,
                    name,
                    total.get(name, 0.0),
                )

    def _watch(self, spec: bytes) -> None:
        """Keep every actor running its agent, and record why actors end. Runs in a separate thread because Ray's calls
        block."""
        ray = self._ray
        running = {actor.run.remote(spec): actor for actor in self._actors}
        while not self._is_closed:
            done, _ = ray.wait(list(running), num_returns=1, timeout=_WATCH_S)
            for ref in done:
                actor = running.pop(ref)
                try:
                    ray.get(ref)
                except ray.exceptions.RayError as error:
                    if not self._is_dismissed:
                        logger.warning("a Ray actor has ended: %s", " ".join(str(error).split()))
                if self._is_dismissed:
                    return
                time.sleep(_RETRY_S)
                # Ray restarts the actor where there is room; the call waits for that.
                running[actor.run.remote(spec)] = actor


class RankActor:
    """Runs on a node of the cluster, in a Ray process."""

    def run(self, spec: bytes) -> None:
        """Run an agent, and through it one worker, until the engine or its core ends."""
        logging.basicConfig(format="%(levelname)s %(asctime)s (%(name)s) %(message)s", level=logging.INFO)
        agent = msgspec.msgpack.decode(spec, type=AgentSpec)
        NodeAgent(msgspec.structs.replace(agent, node=node_name())).run()
