"""How many blocks and states are kept in host memory, and how much memory they need. Pure arithmetic, for
`sizing.py`."""

from collections.abc import Sequence
from typing import NamedTuple

from octavo.core_proc.cache import state_sizing
from octavo.core_proc.cache.groups import CacheGroups
from octavo.protocol.config import DeviceFacts, ResolvedConfig
from octavo.protocol.config.offloading import MIN_STAGING_ROWS, MIN_STATE_STAGING_ROWS, num_staging_rows
from octavo.protocol.errors import NotEnoughMemoryError

PHASE = "planning the KV cache"


class HostSizes(NamedTuple):
    """What each worker keeps in host memory, without staging rows."""

    num_blocks: int
    num_states: int


def host_sizes(config: ResolvedConfig, facts: Sequence[DeviceFacts], groups: CacheGroups) -> HostSizes:
    """Return the number of blocks and states that each worker keeps in host memory.

    Raises:
        NotEnoughMemoryError: the configured size does not hold one of each.
    """
    block_bytes = sum(fact.kv_block_bytes for fact in facts)
    interval = groups.state.interval if groups.state else 0
    state_bytes = sum(fact.state_bytes for fact in facts) if interval else 0
    num_landing = state_sizing.num_landing_states(state_bytes) if config.stores_blocks else 0
    if not (num_bytes := config.kv_offloading_bytes):
        return HostSizes(0, num_landing)
    if num_bytes < block_bytes + state_bytes:
        parts = [("one KV block", block_bytes), ("one recurrent state", state_bytes)]
        takes = " and ".join(f"{name} takes {shown(size)}" for name, size in parts if size)
        message = f"{takes}, but --kv-offloading-size is {shown(num_bytes)}"
        raise NotEnoughMemoryError(message, phase=PHASE, hint="use a larger --kv-offloading-size, or 0 for none")
    num_states = state_sizing.num_host_states(
        num_bytes, state_bytes, block_bytes * groups.num_groups * interval // config.block_size
    )
    if state_bytes:  # at least one block must fit too
        num_states = max(num_states, min(num_landing, (num_bytes - block_bytes) // state_bytes))
    num_blocks = (num_bytes - num_states * state_bytes) // block_bytes if block_bytes else 0
    return HostSizes(num_blocks, num_states)


def host_bytes(config: ResolvedConfig, fact: DeviceFacts, sizes: HostSizes) -> int:
    """Return the host memory of one worker for blocks and states in bytes, including staging rows."""
    num_bytes = sizes.num_blocks * fact.kv_block_bytes + sizes.num_states * fact.state_bytes
    return num_bytes + staging_bytes(config, fact, sizes)


def staging_bytes(config: ResolvedConfig, fact: DeviceFacts, sizes: HostSizes) -> int:
    """Return the host memory in bytes through which a worker reads and writes files."""
    if not config.stores_blocks:
        return 0
    num_bytes = num_staging_rows(fact.kv_block_bytes, MIN_STAGING_ROWS) * fact.kv_block_bytes
    if sizes.num_states:
        num_bytes += num_staging_rows(fact.state_bytes, MIN_STATE_STAGING_ROWS) * fact.state_bytes
    return num_bytes


def shown(num_bytes: int) -> str:
    """Format a number of bytes for humans."""
    if abs(num_bytes) < 2**30:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**30:.2f} GiB"
