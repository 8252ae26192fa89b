"""KV connectors: user code that keeps KV blocks outside of an engine and finds them again.

The methods have the names of vLLM's connectors where they mean the same. Contents have keys, so a connector is little
more than a key-value store: it knows no layers, no block ids and no steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias


class KVConnectorRole(Enum):
    """In which process a connector is."""

    SCHEDULER = 0
    """The core, which decides. It has no rank."""
    WORKER = 1
    """A worker, which has the bytes."""


@dataclass(frozen=True)
class KVConnectorConfig:
    """What a connector learns of its engine."""

    extra_config: Mapping[str, Any]
    """`kv_connector_extra_config`."""
    block_size: int
    """Tokens of a block."""
    world_size: int
    """Workers of the engine; each saves and loads its own part of a block."""
    rank: int
    """Of the worker; -1 in the core."""


@dataclass(frozen=True)
class ConnectorRequest:
    """A request that is about to be scheduled."""

    request_id: str
    token_ids: Sequence[int]
    """Of the prompt, and outputs that were delivered before a restart."""
    block_keys: Sequence[Sequence[str]]
    """Of each full block that may be loaded, from the first on: the keys of its contents, one for each cache group.
    A group with a window needs the last blocks only."""
    state_keys: Sequence[str] = ()
    """For each of these blocks the key of the recurrent state after it; () if the model has none. Few of these states
    are ever saved. What can be loaded ends after a block whose state can be loaded too."""


KVBlock: TypeAlias = tuple[str, memoryview]
"""Key and bytes of a content. All blocks of a worker have the same size, and so have all states. The key names
everything that the bytes depend on, besides the rank: the engine's identity, the layout, and all tokens up to the end
of the block."""


def content_key(namespace: str, key: bytes) -> str:
    """Return the name of a content outside of its engine.

    Args:
        namespace: of engines that compute the same bits and divide them alike.
        key: in the pool of blocks.
    """
    return f"{namespace}/{key.hex()}"


class KVConnectorBase(ABC):
    """Base class of connectors. An engine has one in the core and one in each worker.

    A connector may lose or refuse anything at any time: what does not come is computed. An exception counts as that,
    and is logged. What it returns must have the bytes that were saved under the key, and not be forgotten.
    """

    def __init__(self, config: KVConnectorConfig, role: KVConnectorRole) -> None:
        """Prepare.

        Raises:
            Exception: anything; the engine does not start.
        """
        self.config = config
        self.role = role

    # In the core, on a thread of its own.

    @abstractmethod
    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> int:
        """Return how many tokens after the first `num_computed_tokens` can be loaded; the rest is computed.

        Blocks until: it knows. The request waits, others do not, except those that are asked about after it. After
        `--execute-model-timeout` they are computed, and nothing is asked until the call has returned.
        """

    def request_finished(self, request_id: str) -> None:
        """Learn that a request has finished, failed or was aborted. The connector may not have been asked about it."""
        return

    @abstractmethod
    def forget(self, keys: Sequence[str]) -> None:
        """Drop contents of all ranks that must not be used any more: they may be wrong, or hold NaN.

        After it has returned, nobody may find or load them until they are saved again, not even after a restart.
        """

    # In each worker: loads on one thread, saves on another one. `wait_for_load` and `wait_for_save` are called in every
    # case, even if the method before has raised. If one of them raises, its buffers are not used again, because the
    # connector may still read or write them.

    @abstractmethod
    def start_load_kv(self, blocks: Sequence[KVBlock]) -> None:
        """Begin to write contents into these buffers."""

    @abstractmethod
    def wait_for_load(self) -> Collection[str]:
        """Return the keys that could not be loaded. Blocks until: the buffers are no longer written."""

    @abstractmethod
    def save_kv(self, blocks: Sequence[KVBlock]) -> None:
        """Begin to save contents from these buffers."""

    @abstractmethod
    def wait_for_save(self) -> Collection[str]:
        """Return the keys that were not saved. Blocks until: the buffers are no longer read."""

    # In both.

    def shutdown(self) -> None:
        """Give up what the connector holds: the process ends, or the cache is freed."""
        return
