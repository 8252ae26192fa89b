"""Nodes that an outside launcher starts (`--nnodes`): each runs `octavo serve --node-rank K`, and joins node 0."""

from octavo.core_proc.workers.agents import Agents
from octavo.protocol.control import AgentSpec, CoreSpec
from octavo.protocol.curve import GroupKeys
from octavo.protocol.env import Env
from octavo.protocol.supervise import Child

AGENT_MODULE = "octavo.core_proc.workers"


class LaunchedNodes(Agents):
    """The agents of all nodes; that of this one, node 0, is a child of this process.

    Call all methods from the thread that made it: the child dies with that thread.

    Args:
        spec: of the core.
        module: what each worker runs.

    Raises:
        ConfigError: other machines can reach the address, and there are no keys, or they cannot be read.
        StartupError: the address cannot be bound.
        OSError: the agent of this node cannot be started.
    """

    def __init__(self, spec: CoreSpec, module: str) -> None:
        config = spec.config
        keys = GroupKeys.of(config.group_secret_key_file, Env.read().group_secret_key)
        super().__init__(
            f"tcp://{config.master_addr}:{config.master_port}",
            keys,
            config.num_nodes,
            is_uniform=config.device == "cpu",
        )
        self._agent_spec = AgentSpec(
            core_address=self.address,
            secret=keys.secret.decode() if keys else "",
            node="0",
            position=0,
            capacity=config.ranks_per_node,
            worker_module=module,
            log_level=spec.log_level,
            log_config=spec.log_config,
        )
        self._own_agent = Child.spawn(AGENT_MODULE, self._agent_spec, "agent of node 0")

    def poll(self) -> None:
        """See `Agents.poll`. Starts the agent of this node again if it has died."""
        if not self._is_closed and not self._own_agent.is_alive:
            self._own_agent.close()
            self._own_agent = Child.spawn(AGENT_MODULE, self._agent_spec, "agent of node 0")
        super().poll()

    def close(self) -> None:
        """See `Agents.close`."""
        if not self._is_closed:
            super().close()
            self._own_agent.stop(timeout_s=1.0)
