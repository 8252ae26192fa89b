"""KV connectors: user code that stores KV blocks outside of an engine and finds them again.

Methods have the names of vLLM's connectors if they mean the same. Block contents have keys, so a connector is little
more than a key-value store: it knows no layers, no block ids and no steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias


class KVConnectorRole(Enum):
    """The process in which a connector runs."""

    SCHEDULER = 0
    """The core, which decides. It has no rank."""
    WORKER = 1
    """A worker, which holds the bytes."""


@dataclass(frozen=True)
class KVConnectorConfig:
    """What a connector knows about its engine."""

    extra_config: Mapping[str, Any]
    """`kv_connector_extra_config`."""
    block_size: int
    """Tokens per block."""
    world_size: int
    """Number of workers of the engine. Each one saves and loads its own part of a block."""
    rank: int
    """Rank of the worker; -1 in the core."""


@dataclass(frozen=True)
class ConnectorRequest:
    """A request that is about to be scheduled."""

    request_id: str
    token_ids: Sequence[int]
    """The prompt, and outputs that were delivered before a restart."""
    block_keys: Sequence[Sequence[str]]
    """For each full block that may be loaded, starting with the first one: its keys, one per cache group. A group with
    a window needs only the last blocks."""
    state_keys: Sequence[str] = ()
    """For each of these blocks, the key of the recurrent state after it. Empty if the model has no states. Few of these
    states are ever saved. A loadable prefix must end after a block whose state can be loaded too."""


KVBlock: TypeAlias = tuple[str, memoryview]
"""Key and bytes of a block or state. All blocks of a worker have the same size, and so have all states. The key covers
everything that the bytes depend on except the rank: the engine's identity, the layout, and all tokens up to the end of
the block."""


def content_key(namespace: str, key: bytes) -> str:
    """Return the key of a block or state outside of its engine.

    Args:
        namespace: namespace of engines that compute the same bits and use the same sharding.
        key: key in the block pool.
    """
    return f"{namespace}/{key.hex()}"


class KVConnectorBase(ABC):
    """Base class of connectors. An engine has one connector in the core and one in each worker.

    A connector may lose or reject anything at any time: whatever does not arrive is computed. An exception has the same
    effect and is logged. Returned bytes must be those that were saved under the key, and must not have been forgotten.
    """

    def __init__(self, config: KVConnectorConfig, role: KVConnectorRole) -> None:
        """Initialize the connector.

        Raises:
            Exception: any exception; the engine does not start.
        """
        self.config = config
        self.role = role

    # In the core, in a separate thread.

    @abstractmethod
    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> int:
        """Return how many tokens after the first `num_computed_tokens` can be loaded. The rest is computed.

        Blocks until: the answer is known. Meanwhile this request waits, and so do requests that are looked up after it.
        After `--execute-model-timeout` they are computed, and the connector is not asked again until the call has
        returned.
        """

    def request_finished(self, request_id: str) -> None:
        """Called when a request has finished, failed or was aborted, even if the connector was never asked about it."""
        return

    @abstractmethod
    def forget(self, keys: Sequence[str]) -> None:
        """Drop these keys for all ranks: their contents may be wrong or contain NaN.

        After this method has returned, they must not be found or loaded until they are saved again, not even after a
        restart.
        """

    # In each worker: loads in one thread, saves in another one. `wait_for_load` and `wait_for_save` are always called,
    # even if the preceding method has raised. If one of them raises, its buffers are not reused, because the connector
    # may still read or write them.

    @abstractmethod
    def start_load_kv(self, blocks: Sequence[KVBlock]) -> None:
        """Start to write contents into these buffers."""

    @abstractmethod
    def wait_for_load(self) -> Collection[str]:
        """Return the keys that could not be loaded. Blocks until: the buffers are no longer written."""

    @abstractmethod
    def save_kv(self, blocks: Sequence[KVBlock]) -> None:
        """Start to save contents from these buffers."""

    @abstractmethod
    def wait_for_save(self) -> Collection[str]:
        """Return the keys that were not saved. Blocks until: the buffers are no longer read."""

    # In both processes.

    def shutdown(self) -> None:
        """Release the connector's resources, because the process ends or the cache is freed."""
        return
