"""How many KV blocks there are: from what the workers measured to the `CachePlan`, and the table that explains it.

Pure arithmetic: measures nothing, allocates nothing.
"""

from collections.abc import Sequence

from octavo.core_proc.cache.groups import CacheGroups
from octavo.protocol.config import CacheGroupSpec, CachePlan, DeviceFacts, ResolvedConfig
from octavo.protocol.errors import NotEnoughMemoryError

CPU_CACHE_CEILING_BYTES = 4 * 2**30
"""Upper limit of the automatic cache size on a CPU, unless one request of `max_model_len` needs more.

Main memory is shared with everything else on the machine; `--kv-cache-memory-bytes` asks for more.
"""

_PHASE = "planning the KV cache"
_MAX_UTILIZATION = 0.98
_UNLIMITED = 2**62


def plan_cache(config: ResolvedConfig, facts: Sequence[DeviceFacts]) -> CachePlan:
    """Decide the number of blocks, the same for every worker, and the length limit that goes with it.

    Args:
        config: overrides win over the arithmetic `free x gpu_memory_utilization - weights - activations`.
        facts: one for each worker; the one with the least room decides.

    Raises:
        NotEnoughMemoryError: not even one request of `max_model_len` tokens fits; the hint names a flag
            and a value with which it would.
    """
    groups = CacheGroups.of(config, _groups_of_model(facts))
    tightest = min(facts, key=lambda fact: _num_blocks(config, fact))
    num_blocks = _num_blocks(config, tightest)
    longest = groups.longest_request(num_blocks, config.max_model_len)
    if longest < config.max_model_len and not (config.fits_model_len and longest):
        raise _not_enough(config, tightest, num_blocks)
    return CachePlan(
        blocks_per_group=[num_blocks] * groups.num_groups,
        block_size=config.block_size,
        max_model_len=longest,
        kv_cache_bytes=num_blocks * max(fact.kv_block_bytes for fact in facts),
        cache_groups=_groups_of_model(facts),
        max_request_blocks=groups.max_request_blocks(longest) if groups.num_groups > 1 or groups.windowed else 0,
    )


def memory_table(config: ResolvedConfig, facts: Sequence[DeviceFacts], plan: CachePlan) -> str:
    """Return the start-up table: where each worker's memory goes, and what the cache holds."""
    lines = []
    for fact in facts:
        cache_bytes = plan.num_blocks * fact.kv_block_bytes
        rows = [
            ("weights", fact.weights_bytes),
            ("activations (peak)", fact.activation_bytes),
            *([("CUDA graphs", fact.graph_bytes)] if fact.graph_bytes else []),
            ("KV cache", cache_bytes),
            ("reserve", fact.free_bytes - _taken(fact) - cache_bytes),
            ("free at start", fact.free_bytes),
        ]
        lines.append(f"memory of worker {fact.rank} ({fact.device_name}):")
        lines += [f"  {name:<20} {_shown(num_bytes):>10}" for name, num_bytes in rows]
    tightest = min(facts, key=lambda fact: _num_blocks(config, fact))
    lines += _group_lines(config, facts, plan)
    lines.append(f"KV cache limited by: {_limit(config, tightest)}")
    lines.append(f"KV cache size: {plan.num_tokens:,} tokens")
    lines.append(
        f"Maximum concurrency for {plan.max_model_len:,} tokens per request: {plan.max_concurrency:.2f}x",
    )
    return "\n".join(lines)


def _groups_of_model(facts: Sequence[DeviceFacts]) -> list[CacheGroupSpec]:
    """Return the groups that all workers have, with the layers of each: those of one worker, or of the stages."""
    first, *others = [[(group.kind, group.window) for group in fact.cache_groups] for fact in facts]
    assert all(groups == first for groups in others), f"workers with different cache groups: {[first, *others]}"
    return facts[0].cache_groups


def _group_lines(config: ResolvedConfig, facts: Sequence[DeviceFacts], plan: CachePlan) -> list[str]:
    """Return what one request takes of the first worker's memory in each kind of cache group; [] for a single group."""
    if not plan.max_request_blocks:
        return []
    groups, specs, block_bytes = CacheGroups.of_plan(config, plan), plan.cache_groups, facts[0].kv_block_bytes
    num_blocks = groups.max_blocks_per_group(plan.max_model_len)
    where = f" on worker {facts[0].rank}" if len(facts) > 1 else ""
    lines = [f"KV cache of a request of {plan.max_model_len:,} tokens{where}:"]
    for kind, window in dict.fromkeys((spec.kind, spec.window) for spec in specs):
        alike = [index for index, spec in enumerate(specs) if (spec.kind, spec.window) == (kind, window)]
        name = {"full": "full", "window": f"window of {window:,}", "chunk": f"chunks of {window:,}"}[kind]
        num_layers, held = sum(specs[index].num_layers for index in alike), sum(num_blocks[index] for index in alike)
        layers = f"{num_layers} layers in {len(alike)} group{'s' if len(alike) > 1 else ''}"
        lines.append(f"  {name:<20} {_shown(held * block_bytes):>10}  {layers}")
    # A model without windows would keep all its layers in one group.
    full_bytes = sum(spec.block_bytes for spec in specs) * -(-plan.max_model_len // plan.block_size)
    total_bytes = sum(num_blocks) * block_bytes
    share = 100 * total_bytes / full_bytes
    lines.append(f"  {'in all':<20} {_shown(total_bytes):>10}  {share:.1f} % of full attention in every layer")
    return lines


def _num_blocks(config: ResolvedConfig, fact: DeviceFacts) -> int:
    """Return the blocks that one worker is to hold; 0 or less when there is no room."""
    if config.num_blocks_override is not None:
        return config.num_blocks_override
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes // fact.kv_block_bytes
    return min(_room(config, fact) // fact.kv_block_bytes, _useful(config, fact), _ceiling(config, fact))


def _useful(config: ResolvedConfig, fact: DeviceFacts) -> int:
    """Return how many blocks can be in use at the same time. On a GPU the rest still serves as prefix cache."""
    return _num_blocks_needed(config, fact) * config.max_num_seqs if config.device == "cpu" else _UNLIMITED


def _ceiling(config: ResolvedConfig, fact: DeviceFacts) -> int:
    """Return the most blocks that the automatic size takes on a CPU, whose memory other programs use too."""
    if config.device != "cpu":
        return _UNLIMITED
    return max(_num_blocks_needed(config, fact), CPU_CACHE_CEILING_BYTES // fact.kv_block_bytes)


def _limit(config: ResolvedConfig, fact: DeviceFacts) -> str:
    """Return what limited the number of blocks, in terms of the user's settings."""
    if config.num_blocks_override is not None:
        return "--num-gpu-blocks-override"
    if config.kv_cache_memory_bytes is not None:
        return "--kv-cache-memory-bytes"
    num_blocks = _num_blocks(config, fact)
    if num_blocks == _useful(config, fact):
        return "--max-num-seqs requests of --max-model-len tokens need no more"
    if num_blocks == _ceiling(config, fact):
        return f"at most {_shown(CPU_CACHE_CEILING_BYTES)} on a CPU unless --kv-cache-memory-bytes asks for more"
    return f"--gpu-memory-utilization {config.gpu_memory_utilization:g} of the memory{_memory_qualifier(config)}"


def _num_blocks_needed(config: ResolvedConfig, fact: DeviceFacts) -> int:
    """Return the blocks of one request of `max_model_len` tokens."""
    return CacheGroups.of(config, fact.cache_groups).max_request_blocks(config.max_model_len)


def _not_enough(config: ResolvedConfig, fact: DeviceFacts, num_blocks: int) -> NotEnoughMemoryError:
    """Return the error, with the change that costs the user least."""
    groups = CacheGroups.of(config, fact.cache_groups)
    longest, num_needed = groups.longest_request(num_blocks, config.max_model_len), _num_blocks_needed(config, fact)
    one_request = f"one request of --max-model-len {config.max_model_len} needs {num_needed} KV blocks"
    shorter = f"--max-model-len {longest}"
    if config.num_blocks_override is not None:
        return NotEnoughMemoryError(
            f"{one_request}, but --num-gpu-blocks-override allows {num_blocks}",
            phase=_PHASE,
            hint=f"use --num-gpu-blocks-override {num_needed} or {shorter}",
        )
    need_bytes = num_needed * fact.kv_block_bytes
    if config.kv_cache_memory_bytes is not None:
        more = f"--kv-cache-memory-bytes {need_bytes}"
        return NotEnoughMemoryError(
            f"{one_request} ({_shown(need_bytes)}), but --kv-cache-memory-bytes {config.kv_cache_memory_bytes} "
            f"holds {num_blocks}",
            phase=_PHASE,
            hint=f"use {more} or {shorter}" if longest else f"use {more}",
        )
    message = (
        f"{one_request} ({_shown(need_bytes)}), but {fact.device_name} has {_shown(fact.free_bytes)} free, of which "
        f"--gpu-memory-utilization {config.gpu_memory_utilization:g} leaves {_shown(max(0, _room(config, fact)))} "
        f"after {_shown(fact.weights_bytes)} of weights and {_shown(fact.activation_bytes)} of activations"
        + (f", and {_shown(fact.graph_bytes)} of CUDA graphs" if fact.graph_bytes else "")
    )
    return NotEnoughMemoryError(message, phase=_PHASE, hint=_cheapest_change(config, fact, longest, need_bytes))


def _cheapest_change(config: ResolvedConfig, fact: DeviceFacts, longest: int, need_bytes: int) -> str:
    """Return the hint for the computed size: more of the memory, a shorter limit, or a smaller model."""
    options = []
    taken = _taken(fact)
    # Rounded up, so that the value named is enough.
    utilization = -(-(taken + need_bytes) * 1000 // _shared_bytes(config, fact)) / 1000
    is_free = taken + need_bytes <= fact.free_bytes
    if config.gpu_memory_utilization < utilization <= _MAX_UTILIZATION and is_free:
        options.append(f"--gpu-memory-utilization {utilization:g}")
    if fact.graph_bytes and taken - fact.graph_bytes + need_bytes <= _usable(config, fact):
        options.append("--enforce-eager")
    if longest > 0:
        options.append(f"--max-model-len {longest}")
    if options:
        return "use " + " or ".join(options)
    missing = taken + need_bytes - _usable(config, fact)
    smaller = "--dtype bfloat16 or a smaller model" if config.dtype == "float32" else "a smaller model"
    return f"free {_shown(missing)} more memory, or use {smaller}"


def _room(config: ResolvedConfig, fact: DeviceFacts) -> int:
    return _usable(config, fact) - _taken(fact)


def _usable(config: ResolvedConfig, fact: DeviceFacts) -> int:
    """Return the bytes that this worker may use: never more than are free."""
    return min(fact.free_bytes, int(_shared_bytes(config, fact) * config.gpu_memory_utilization))


def _shared_bytes(config: ResolvedConfig, fact: DeviceFacts) -> int:
    """Return the memory that `--gpu-memory-utilization` refers to: what is free on a CPU, all of it on a GPU."""
    return fact.free_bytes if config.device == "cpu" else fact.total_bytes


def _memory_qualifier(config: ResolvedConfig) -> str:
    return " that is free" if config.device == "cpu" else ", or what is free of it"


def _taken(fact: DeviceFacts) -> int:
    """Return the bytes of everything but the cache."""
    return fact.weights_bytes + fact.activation_bytes + fact.graph_bytes


def _shown(num_bytes: int) -> str:
    if abs(num_bytes) < 2**30:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**30:.2f} GiB"
