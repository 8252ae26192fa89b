"""`run_node`: a further machine of an engine (`octavo serve --node-rank K`), which runs only workers."""

import logging
import socket

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.control import AgentSpec
from octavo.protocol.curve import GroupKeys, check_remote
from octavo.protocol.env import Env
from octavo.protocol.lifecycle import adopt_orphans
from octavo.protocol.log import log_settings
from octavo.protocol.supervise import Child, ChildExited

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0


def run_node(config: ResolvedConfig, node_rank: int) -> None:
    """Run this machine's workers.

    Blocks until: the engine has ended.

    Args:
        config: configuration of the engine, as read on this machine, where the paths of the model may differ.
        node_rank: number of this machine.

    Raises:
        ConfigError: the address needs keys, or the keys cannot be read.
        StartupError: no engine answers, at the start or after the connection was lost.
    """
    address = f"tcp://{config.master_addr}:{config.master_port}"
    keys = GroupKeys.of(config.group_secret_key_file, Env.read().group_secret_key)
    check_remote(address, keys is not None)
    log_level, log_config = log_settings()
    spec = AgentSpec(
        core_address=address,
        secret=keys.secret.decode() if keys else "",
        node=f"{node_rank} ({socket.gethostname()})",
        position=node_rank,
        capacity=config.ranks_per_node,
        worker_module="octavo.worker_proc",
        model=config.model,
        log_level=log_level,
        log_config=log_config,
    )
    logger.info("node %d of %d: joining the engine at %s", node_rank, config.num_nodes, address)
    adopt_orphans()
    agent = Child.spawn("octavo.core_proc.workers", spec, f"agent of node {node_rank}", leads_group=True)
    try:
        while True:
            agent.receive()
    except ChildExited as exited:
        if exited.code:
            raise exited.as_startup_error("joining the engine") from exited
        logger.info("node %d: the engine has ended", node_rank)
    finally:
        agent.stop(STOP_TIMEOUT_S)
