"""Computes the number of KV blocks: from the workers' measurements to the `CachePlan`, and the table that explains it.

Pure arithmetic: measures nothing, allocates nothing.
"""

from collections.abc import Sequence

import msgspec

from octavo.core_proc.cache import state_sizing
from octavo.core_proc.cache.groups import CacheGroups, checkpoint_interval
from octavo.core_proc.cache.host_sizing import PHASE, HostSizes, host_bytes, host_sizes, shown, staging_bytes
from octavo.protocol.config import CacheGroupSpec, CachePlan, DeviceFacts, ResolvedConfig
from octavo.protocol.errors import NotEnoughMemoryError

CPU_CACHE_CEILING_BYTES = 4 * 2**30
"""Upper limit of the automatic cache size on a CPU in bytes, unless one request of `max_model_len` needs more.

Main memory is shared with everything else on the machine. `--kv-cache-memory-bytes` requests more.
"""

_MAX_UTILIZATION = 0.98
_UNLIMITED = 2**62


def plan_cache(config: ResolvedConfig, facts: Sequence[DeviceFacts]) -> CachePlan:
    """Compute the number of blocks, equal for all workers, and the resulting length limit.

    Args:
        config: the engine's configuration. Overrides win over `free x gpu_memory_utilization - weights - activations`.
        facts: facts of each worker. The worker with the least room decides.

    Raises:
        NotEnoughMemoryError: not even one request of `max_model_len` tokens fits. The hint names a flag and a value
            that would suffice.
    """
    specs = _groups_of_model(config, facts)
    groups = CacheGroups.of(config, specs)
    host = host_sizes(config, facts, groups)
    num_states = min(_num_states(config, fact, host) for fact in facts)
    max_request_states = groups.state.max_held if groups.state else 0
    tightest = min(facts, key=lambda fact: _num_blocks(config, fact, num_states, host))
    num_blocks = _num_blocks(config, tightest, num_states, host)
    longest = groups.longest_request(num_blocks, config.max_model_len)
    is_short = longest < config.max_model_len and not (config.fits_model_len and longest)
    if is_short or num_states < max_request_states:
        num_places = num_blocks if groups.num_groups else num_states
        raise _not_enough(config, tightest, host, num_places, max_request_states)
    return CachePlan(
        blocks_per_group=[num_blocks] * groups.num_groups + [num_states] * (groups.state is not None),
        block_size=config.block_size,
        max_model_len=longest,
        kv_cache_bytes=max(num_blocks * fact.kv_block_bytes + num_states * fact.state_bytes for fact in facts),
        cache_groups=specs,
        max_request_blocks=groups.max_request_blocks(longest) if groups.num_groups > 1 or groups.windowed else 0,
        max_request_states=max_request_states,
        num_host_blocks=host.num_blocks,
        host_block_bytes=sum(fact.kv_block_bytes for fact in facts),
        host_block_s=max(fact.host_block_s for fact in facts),
        num_host_states=host.num_states,
        host_state_bytes=sum(fact.state_bytes for fact in facts),
        host_state_s=max(_host_state_s(fact) for fact in facts),
    )


def memory_table(config: ResolvedConfig, facts: Sequence[DeviceFacts], plan: CachePlan) -> str:
    """Return the start-up table: how each worker's memory is used, and what the cache holds."""
    lines, host = [], HostSizes(plan.num_host_blocks, plan.num_host_states)
    for fact in facts:
        cache_bytes, state_bytes = plan.num_blocks * fact.kv_block_bytes, plan.num_states * fact.state_bytes
        rows = [
            ("weights", fact.weights_bytes),
            ("activations (peak)", fact.activation_bytes),
            *([("CUDA graphs", fact.graph_bytes)] if fact.graph_bytes else []),
            *([("LoRA adapters", fact.adapter_bytes)] if fact.adapter_bytes else []),
            *([("exchange of experts", fact.exchange_bytes)] if fact.exchange_bytes else []),
            *([("KV cache", cache_bytes)] if cache_bytes or not state_bytes else []),
            *([("states", state_bytes)] if state_bytes else []),
            *([("offloaded blocks", plan.num_host_blocks * fact.kv_block_bytes)] if plan.num_host_blocks else []),
            *([("offloaded states", plan.num_host_states * fact.state_bytes)] if plan.num_host_states else []),
            *([("staging for files", staging)] if (staging := staging_bytes(config, fact, host)) else []),
            ("reserve", fact.free_bytes - _taken(config, fact, host) - cache_bytes - state_bytes),
            ("free at start", fact.free_bytes),
        ]
        lines.append(f"memory of worker {fact.rank} ({fact.device_name}):")
        lines += [f"  {name:<20} {shown(num_bytes):>10}" for name, num_bytes in rows]
    tightest = min(facts, key=lambda fact: _num_blocks(config, fact, plan.num_states, host))
    lines += _group_lines(config, facts, plan)
    lines.append(f"KV cache limited by: {_limit(config, tightest, plan.num_states, host)}")
    token_bytes = sum(spec.block_bytes for spec in plan.cache_groups if spec.kind != "state") // plan.block_size
    where = f" on worker {facts[0].rank}" if len(facts) > 1 else ""
    lines.append(f"KV cache size: {plan.num_tokens:,} tokens, {token_bytes:,} bytes each{where}")
    lines.append(
        f"Maximum concurrency for {plan.max_model_len:,} tokens per request: {plan.max_concurrency:.2f}x",
    )
    return "\n".join(lines)


def _host_state_s(fact: DeviceFacts) -> float:
    """Return the seconds to copy a state from host memory, assuming the same bandwidth as for blocks."""
    return fact.host_block_s * fact.state_bytes / fact.kv_block_bytes if fact.kv_block_bytes else 0.0


def _groups_of_model(config: ResolvedConfig, facts: Sequence[DeviceFacts]) -> list[CacheGroupSpec]:
    """Return the groups of the model with their layers: those of one worker, or of all pipeline stages together.

    The checkpoint interval is that of the worker with the largest states.
    """
    first, *others = [[(group.kind, group.window) for group in fact.cache_groups] for fact in facts]
    assert all(groups == first for groups in others), f"workers with different cache groups: {[first, *others]}"
    groups = facts[0].cache_groups
    if (state_bytes := max(fact.state_bytes for fact in facts)) and not groups[-1].window:
        interval = checkpoint_interval(state_bytes, config.block_size)
        groups = [*groups[:-1], msgspec.structs.replace(groups[-1], window=interval)]
    return groups


def _group_lines(config: ResolvedConfig, facts: Sequence[DeviceFacts], plan: CachePlan) -> list[str]:
    """Return lines with the memory per request and kind of cache group on the first worker. Empty for a single
    group."""
    if not plan.max_request_blocks and not plan.has_states:
        return []
    groups, specs, block_bytes = CacheGroups.of_plan(config, plan), plan.cache_groups, facts[0].kv_block_bytes
    num_blocks = groups.max_blocks_per_group(plan.max_model_len)
    where = f" on worker {facts[0].rank}" if len(facts) > 1 else ""
    lines = [f"KV cache of a request of {plan.max_model_len:,} tokens{where}:"]
    for kind, window in dict.fromkeys((spec.kind, spec.window) for spec in specs if spec.kind != "state"):
        alike = [index for index, spec in enumerate(specs) if (spec.kind, spec.window) == (kind, window)]
        name = {"full": "full", "window": f"window of {window:,}", "chunk": f"chunks of {window:,}"}[kind]
        num_layers, held = sum(specs[index].num_layers for index in alike), sum(num_blocks[index] for index in alike)
        layers = f"{num_layers} layers in {len(alike)} group{'s' if len(alike) > 1 else ''}"
        lines.append(f"  {name:<20} {shown(held * block_bytes):>10}  {layers}")
    if groups.state is not None:
        name = "states" if plan.max_request_states > 1 else "state"
        held_bytes, num_layers = plan.max_request_states * facts[0].state_bytes, specs[-1].num_layers
        where = f", checkpoints {groups.state.interval:,} tokens apart" if groups.state.interval else ""
        lines.append(f"  {plan.max_request_states} {name:<18} {shown(held_bytes):>10}  {num_layers} layers{where}")
        return lines
    # A model without windows would keep all its layers in one group.
    full_bytes = sum(spec.block_bytes for spec in specs) * -(-plan.max_model_len // plan.block_size)
    total_bytes = sum(num_blocks) * block_bytes
    share = 100 * total_bytes / full_bytes
    lines.append(f"  {'in all':<20} {shown(total_bytes):>10}  {share:.1f} % of full attention in every layer")
    return lines


def _num_states(config: ResolvedConfig, fact: DeviceFacts, host: HostSizes) -> int:
    """Return the number of state slots of one worker. Their memory is taken from the cache."""
    request_bytes = _num_blocks_needed(config, fact) * fact.kv_block_bytes
    cache_bytes = config.kv_cache_memory_bytes
    if cache_bytes is None:
        cache_bytes = _room(config, fact, host)
        if config.device == "cpu":
            ceiling_bytes = state_sizing.ceiling_bytes(config, fact)
            cache_bytes = min(cache_bytes, max(CPU_CACHE_CEILING_BYTES, ceiling_bytes, 2 * request_bytes))
    return state_sizing.num_states(config, fact, cache_bytes, request_bytes)


def _num_blocks(config: ResolvedConfig, fact: DeviceFacts, num_states: int, host: HostSizes) -> int:
    """Return the number of blocks that one worker can hold in addition to its states; 0 or less if there is no room."""
    if not fact.has_blocks:
        return 0
    if config.num_blocks_override is not None:
        return config.num_blocks_override
    if not fact.kv_block_bytes:  # a pipeline stage with only recurrent layers
        return _UNLIMITED
    state_bytes = num_states * fact.state_bytes
    if config.kv_cache_memory_bytes is not None:
        return (config.kv_cache_memory_bytes - state_bytes) // fact.kv_block_bytes
    num_free = (_room(config, fact, host) - state_bytes) // fact.kv_block_bytes
    return min(num_free, _useful(config, fact), _ceiling(config, fact, num_states))


def _useful(config: ResolvedConfig, fact: DeviceFacts) -> int:
    """Return how many blocks can be in use at the same time. On a GPU the rest still serves as prefix cache."""
    if config.computes_whole_prompts:
        # Keys are read in the step that computes them, and the next step may be planned meanwhile.
        in_one_step = -(-config.max_num_batched_tokens // config.block_size) + config.max_num_seqs
        num_groups = len([group for group in fact.cache_groups if group.kind != "state"])
        return 2 * in_one_step * num_groups
    return _num_blocks_needed(config, fact) * config.max_num_seqs if config.device == "cpu" else _UNLIMITED


def _ceiling(config: ResolvedConfig, fact: DeviceFacts, num_states: int) -> int:
    """Return the most blocks that the automatic size allows on a CPU, whose memory other programs use too."""
    if config.device != "cpu" or not fact.kv_block_bytes:
        return _UNLIMITED
    rest_bytes = CPU_CACHE_CEILING_BYTES - min(num_states * fact.state_bytes, CPU_CACHE_CEILING_BYTES // 2)
    return max(_num_blocks_needed(config, fact), rest_bytes // fact.kv_block_bytes)


def _limit(config: ResolvedConfig, fact: DeviceFacts, num_states: int, host: HostSizes) -> str:
    """Return what limited the number of blocks, in terms of the user's settings."""
    if config.num_blocks_override is not None:
        return "--num-gpu-blocks-override"
    if config.kv_cache_memory_bytes is not None:
        return "--kv-cache-memory-bytes"
    num_blocks = _num_blocks(config, fact, num_states, host)
    is_used = num_blocks == _useful(config, fact)
    is_at_ceiling = num_blocks == _ceiling(config, fact, num_states)
    if not fact.kv_block_bytes:
        is_used = num_states == state_sizing.most_states(config, fact)
        is_at_ceiling = config.device == "cpu" and (num_states + 1) * fact.state_bytes <= _room(config, fact, host)
    if is_used:
        return "--max-num-seqs requests of --max-model-len tokens need no more"
    if is_at_ceiling:
        states = f", or the states of {state_sizing.CPU_REQUESTS} requests," * bool(num_states)
        return f"at most {shown(CPU_CACHE_CEILING_BYTES)}{states} on a CPU unless --kv-cache-memory-bytes asks for more"
    return f"--gpu-memory-utilization {config.gpu_memory_utilization:g} of the memory{_memory_qualifier(config)}"


def _num_blocks_needed(config: ResolvedConfig, fact: DeviceFacts) -> int:
    """Return the blocks that one request of `max_model_len` tokens needs."""
    return CacheGroups.of(config, fact.cache_groups).max_request_blocks(config.max_model_len)


def _not_enough(
    config: ResolvedConfig, fact: DeviceFacts, host: HostSizes, num_blocks: int, num_states: int
) -> NotEnoughMemoryError:
    """Return the error, with the change that costs the user least.

    Args:
        config: the engine's configuration.
        fact: facts of the worker with the least room.
        host: sizes of its host memory.
        num_blocks: blocks that fit, or slots of states if the model has no blocks.
        num_states: slots of states that one request needs.
    """
    groups = CacheGroups.of(config, fact.cache_groups)
    num_needed = _num_blocks_needed(config, fact)
    need_bytes = num_needed * fact.kv_block_bytes + num_states * fact.state_bytes
    # Without blocks a shorter request needs just as much.
    longest = groups.longest_request(num_blocks, config.max_model_len) if groups.num_groups else 0
    needed = [f"{num_needed} KV blocks"] * bool(num_needed) + [f"{num_states} states"] * bool(num_states)
    one_request = f"one request of --max-model-len {config.max_model_len} needs {' and '.join(needed)}"
    shorter = f"--max-model-len {longest}"
    if config.num_blocks_override is not None:
        return NotEnoughMemoryError(
            f"{one_request}, but --num-gpu-blocks-override allows {num_blocks}",
            phase=PHASE,
            hint=f"use --num-gpu-blocks-override {num_needed or num_states}" + f" or {shorter}" * bool(longest),
        )
    if config.kv_cache_memory_bytes is not None:
        more = f"--kv-cache-memory-bytes {need_bytes}"
        return NotEnoughMemoryError(
            f"{one_request} ({shown(need_bytes)}), but --kv-cache-memory-bytes {config.kv_cache_memory_bytes} "
            f"holds {num_blocks}",
            phase=PHASE,
            hint=f"use {more} or {shorter}" if longest else f"use {more}",
        )
    kept_bytes = _kept_bytes(config, fact, host)
    message = (
        f"{one_request} ({shown(need_bytes)}), but {fact.device_name} has {shown(fact.free_bytes)} free, of which "
        f"--gpu-memory-utilization {config.gpu_memory_utilization:g} leaves {shown(max(0, _room(config, fact, host)))} "
        f"after {shown(fact.weights_bytes)} of weights and {shown(fact.activation_bytes)} of activations"
        + (f", and {shown(fact.graph_bytes)} of CUDA graphs" if fact.graph_bytes else "")
        + (f", and {shown(kept_bytes)} for offloaded contents and files" if kept_bytes else "")
    )
    return NotEnoughMemoryError(message, phase=PHASE, hint=_cheapest_change(config, fact, host, longest, need_bytes))


def _cheapest_change(config: ResolvedConfig, fact: DeviceFacts, host: HostSizes, longest: int, need_bytes: int) -> str:
    """Return the hint for an automatic size: more memory, a shorter limit, or a smaller model."""
    options = []
    taken = _taken(config, fact, host)
    # Rounded up, so that the suggested value suffices.
    utilization = -(-(taken + need_bytes) * 1000 // _shared_bytes(config, fact)) / 1000
    is_free = taken + need_bytes <= fact.free_bytes
    if config.gpu_memory_utilization < utilization <= _MAX_UTILIZATION and is_free:
        options.append(f"--gpu-memory-utilization {utilization:g}")
    if fact.graph_bytes and taken - fact.graph_bytes + need_bytes <= _usable(config, fact):
        options.append("--enforce-eager")
    if host.num_blocks and taken - _kept_bytes(config, fact, host) + need_bytes <= _usable(config, fact):
        options.append("a smaller --kv-offloading-size")
    if longest > 0:
        options.append(f"--max-model-len {longest}")
    if options:
        return "use " + " or ".join(options)
    missing = taken + need_bytes - _usable(config, fact)
    smaller = "--dtype bfloat16 or a smaller model" if config.dtype == "float32" else "a smaller model"
    return f"free {shown(missing)} more memory, or use {smaller}"


def _room(config: ResolvedConfig, fact: DeviceFacts, host: HostSizes) -> int:
    return _usable(config, fact) - _taken(config, fact, host)


def _usable(config: ResolvedConfig, fact: DeviceFacts) -> int:
    """Return the bytes that this worker may use: at most the free ones."""
    return min(fact.free_bytes, int(_shared_bytes(config, fact) * config.gpu_memory_utilization))


def _shared_bytes(config: ResolvedConfig, fact: DeviceFacts) -> int:
    """Return the memory in bytes that `--gpu-memory-utilization` refers to: free memory on a CPU, all memory on a
    GPU."""
    return fact.free_bytes if config.device == "cpu" else fact.total_bytes


def _memory_qualifier(config: ResolvedConfig) -> str:
    return " that is free" if config.device == "cpu" else ", or what is free of it"


def _taken(config: ResolvedConfig, fact: DeviceFacts, host: HostSizes) -> int:
    """Return the bytes of everything except the cache."""
    measured = fact.weights_bytes + fact.activation_bytes + fact.graph_bytes
    return measured + fact.adapter_bytes + fact.exchange_bytes + _kept_bytes(config, fact, host)


def _kept_bytes(config: ResolvedConfig, fact: DeviceFacts, host: HostSizes) -> int:
    """Return the host memory in bytes for offloaded contents, if it is also the memory of the device."""
    return host_bytes(config, fact, host) if config.device == "cpu" else 0
