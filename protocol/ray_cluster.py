"""Connects a process to a Ray cluster. Ray is an optional extra, imported only here when connecting."""

import logging
import signal
from typing import Any

from octavo.protocol.errors import ConfigError, StartupError

logger = logging.getLogger(__name__)

_NAMESPACE = "octavo"


def connect_to_ray() -> Any:
    """Connect to the cluster of RAY_ADDRESS, or else to that of this machine, and return the module.

    Call it on the main thread.

    Blocks until: connected.

    Raises:
        ConfigError: Ray is not installed.
        StartupError: there is no cluster.
    """
    try:
        import ray
        import ray.exceptions
        import ray.util
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError(f"Ray cannot be used: {error}", hint="pip install 'octavo[ray]'") from error
    logger.info("connecting to Ray")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(address="auto", namespace=_NAMESPACE, log_to_driver=True, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise StartupError(f"there is no Ray cluster: {error}", hint="ray start --head, or set RAY_ADDRESS") from error
    finally:
        for number, handler in handlers.items():  # Ray's handlers would end this process without draining
            signal.signal(number, handler)
    return ray


def node_name() -> str:
    """Return the name of the node on which this Ray process runs, for messages."""
    import ray

    return f"{ray.util.get_node_ip_address()} ({ray.get_runtime_context().get_node_id()[:8]})"
