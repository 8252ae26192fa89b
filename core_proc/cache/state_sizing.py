"""Computes the number of slots for recurrent states. Pure arithmetic; `sizing.py` gives the remaining memory to
blocks."""

from octavo.core_proc.cache.groups import CacheGroups
from octavo.protocol.config import DeviceFacts, ResolvedConfig

CHECKPOINTS_PER_REQUEST = 2
"""Number of slots for checkpoints per running request, in addition to the slots that it holds."""

HOST_CHECKPOINTS_PER_INTERVAL = 2
"""Checkpoints in host memory per interval of KV: the one at the end of the interval, and about one at the end of a
prompt."""

LANDING_BYTES = 256 << 20
MIN_LANDING_STATES, MAX_LANDING_STATES = 4, 64
"""Number of host slots to which states from files are loaded, if host memory keeps no other states."""

CPU_REQUESTS = 32
"""On a CPU the automatic size has room for the states of this many requests if there is enough memory, even above the
ceiling of the cache. Otherwise few requests of large models could run, because their states are large."""

MAX_SHARE = 0.5
"""Largest fraction of the memory that states take if other layers have KV."""


def num_states(config: ResolvedConfig, fact: DeviceFacts, cache_bytes: int, request_bytes: int) -> int:
    """Return the number of state slots of one worker; 0 if its layers have no states.

    Args:
        config: the engine's configuration.
        fact: facts of the worker.
        cache_bytes: memory for states and blocks together.
        request_bytes: memory for the blocks of one request of `max_model_len` tokens.
    """
    group = CacheGroups.of(config, fact.cache_groups).state
    if group is None:
        return 0
    has_blocks = fact.has_blocks
    if config.num_blocks_override is not None and not has_blocks:
        return config.num_blocks_override
    share = min(int(cache_bytes * MAX_SHARE), cache_bytes - request_bytes) if has_blocks else cache_bytes
    num_slots = min(share // max(1, fact.state_bytes), most_states(config, fact))
    return max(num_slots, group.max_held) if has_blocks else max(num_slots, 0)


def most_states(config: ResolvedConfig, fact: DeviceFacts) -> int:
    """Return how many slots `max_num_seqs` requests use, with a reasonable number of checkpoints."""
    group = CacheGroups.of(config, fact.cache_groups).state
    assert group is not None, "a model without states"
    num_checkpoints = CHECKPOINTS_PER_REQUEST if group.interval else 0
    return (group.max_held + num_checkpoints) * config.max_num_seqs


def ceiling_bytes(config: ResolvedConfig, fact: DeviceFacts) -> int:
    """Return the size of a cache with the states of `CPU_REQUESTS` requests in bytes; 0 for a model without states."""
    group = CacheGroups.of(config, fact.cache_groups).state
    if group is None:
        return 0
    state_bytes = min(CPU_REQUESTS, config.max_num_seqs) * group.max_held * fact.state_bytes
    return int(state_bytes / MAX_SHARE) if fact.has_blocks else state_bytes


def num_host_states(host_bytes: int, state_bytes: int, interval_bytes: int) -> int:
    """Return how many checkpoints are kept in host memory, at least one if the model has states.

    Args:
        host_bytes: memory for checkpoints and blocks together, enough for one of each.
        state_bytes: bytes of a state; 0 if no checkpoints are kept.
        interval_bytes: bytes of the KV of the tokens between two checkpoints; 0 if there is no KV.
    """
    if not state_bytes:
        return 0
    if not interval_bytes:
        return host_bytes // state_bytes
    together = HOST_CHECKPOINTS_PER_INTERVAL * state_bytes + interval_bytes
    return max(1, HOST_CHECKPOINTS_PER_INTERVAL * host_bytes // together)


def num_landing_states(state_bytes: int) -> int:
    """Return how many host slots are needed for checkpoints that come from files; 0 if the model has no states."""
    if not state_bytes:
        return 0
    return max(MIN_LANDING_STATES, min(LANDING_BYTES // state_bytes, MAX_LANDING_STATES))
