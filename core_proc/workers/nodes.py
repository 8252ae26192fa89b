"""Nodes started by an external launcher (`--nnodes`): each runs `octavo serve --node-rank K` and joins node 0."""

import logging
from collections.abc import Sequence
from typing import Any

from octavo.core_proc.workers.agents import Agents, Node
from octavo.protocol.control import AgentSpec, CoreSpec
from octavo.protocol.curve import GroupKeys
from octavo.protocol.env import Env
from octavo.protocol.supervise import Child, ChildExited

logger = logging.getLogger(__name__)

AGENT_MODULE = "octavo.core_proc.workers"


class LaunchedNodes(Agents):
    """The agents of all nodes. The agent of this node, node 0, is a child process.

    Call all methods from the thread that created it: the child dies with that thread.

    Args:
        spec: spec of the core.
        module: the module that each worker runs.

    Raises:
        ConfigError: other machines can reach the address, but there are no keys or the keys cannot be read.
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
        self._own_agent = self._spawn_agent()
        self._failure: ChildExited | None = None
        """Why the agent of this node could not start, until this is reported."""

    @property
    def waitables(self) -> Sequence[Any]:
        """See `Agents.waitables`. Includes the control pipe of an agent that has not joined: only the pipe shows its
        exit."""
        waitables = super().waitables
        has_joined = any(member.ready.position == 0 for member in self._members.values())
        return waitables if has_joined or self._is_closed else [*waitables, self._own_agent.fileno()]

    def poll(self) -> None:
        """See `Agents.poll`. Restarts the agent of this node if it has died."""
        if not self._is_closed:
            try:
                while self._own_agent.receive(timeout_s=0) is not None:
                    pass  # its only messages are start-up failures
            except ChildExited as exited:
                logger.error("%s; restarting it", exited)
                self._failure = exited if exited.failure else None
                self._own_agent.close()
                self._own_agent = self._spawn_agent()
        super().poll()

    def place(self, generation: int, num_ranks: int) -> list[Node] | None:
        """See `Agents.place`.

        Raises:
            StartupError: the agent of this node could not start.
        """
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure.as_startup_error("starting the agent of node 0")
        return super().place(generation, num_ranks)

    def _spawn_agent(self) -> Child:
        return Child.spawn(AGENT_MODULE, self._agent_spec, "agent of node 0")

    def close(self) -> None:
        """See `Agents.close`."""
        if not self._is_closed:
            super().close()
            self._own_agent.stop(timeout_s=1.0)
