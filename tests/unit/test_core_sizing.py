"""The number of blocks from measured bytes, and the advice if there are too few."""

import re

import msgspec
import pytest
from core_fakes import core_config

from octavo.core_proc.cache.sizing import CPU_CACHE_CEILING_BYTES, memory_table, plan_cache
from octavo.protocol.config import CacheGroupSpec, DeviceFacts
from octavo.protocol.errors import NotEnoughMemoryError

MIB = 2**20


def device(**changes) -> DeviceFacts:
    facts = {
        "rank": 0,
        "device_name": "cpu",
        "total_bytes": 1000 * MIB,
        "free_bytes": 1000 * MIB,
        "weights_bytes": 300 * MIB,
        "activation_bytes": 100 * MIB,
        "cache_groups": [CacheGroupSpec(num_layers=1, block_bytes=MIB)],
    }
    return DeviceFacts(**{**facts, **changes})


def on_gpu(**changes):
    return core_config(device="cuda", gpu_memory_utilization=0.9, **changes)


def test_the_cache_takes_the_memory_left_by_weights_and_activations():
    plan = plan_cache(on_gpu(), [device()])
    assert (plan.num_blocks, plan.block_size, plan.max_model_len) == (500, 4, 64)
    assert plan.kv_cache_bytes == 500 * MIB
    assert plan.max_concurrency == 500 * 4 / 64


@pytest.mark.parametrize(("field", "name"), [("graph_bytes", "CUDA graphs"), ("exchange_bytes", "exchange of experts")])
def test_graphs_and_the_memory_of_an_exchange_are_counted_and_shown(field: str, name: str):
    facts = device(**{field: 50 * MIB})
    plan = plan_cache(on_gpu(), [facts])
    assert plan.num_blocks == 450
    assert f"{name:<20} {'50.0 MiB':>10}" in memory_table(on_gpu(), [facts], plan)
    assert name not in memory_table(on_gpu(), [device()], plan)


def test_a_share_of_a_gpu_is_one_of_all_its_memory_and_never_more_than_is_free():
    assert plan_cache(on_gpu(), [device(free_bytes=950 * MIB)]).num_blocks == 500
    assert plan_cache(on_gpu(), [device(free_bytes=600 * MIB)]).num_blocks == 200


def test_groups_of_layers_share_the_memory_and_have_as_many_blocks():
    groups = [
        CacheGroupSpec(num_layers=3, block_bytes=3 * MIB // 4),
        CacheGroupSpec(num_layers=1, block_bytes=MIB // 4),
    ]
    plan = plan_cache(on_gpu(), [device(cache_groups=groups)])
    # A block has room for three layers, whichever group it belongs to.
    assert plan.blocks_per_group == [666, 666]
    assert plan.kv_cache_bytes == 666 * 3 * MIB // 4


def test_the_tightest_worker_decides():
    assert plan_cache(on_gpu(), [device(), device(rank=1, weights_bytes=500 * MIB)]).num_blocks == 300


def test_overrides_replace_the_arithmetic():
    assert plan_cache(on_gpu(num_blocks_override=4000), [device()]).num_blocks == 4000
    assert plan_cache(on_gpu(kv_cache_memory_bytes=50 * MIB), [device()]).num_blocks == 50


def test_on_a_cpu_the_cache_is_no_larger_than_could_ever_be_used():
    config = core_config(max_num_seqs=8, max_model_len=64)
    assert plan_cache(config, [device()]).num_blocks == 8 * 64 // 4


def test_on_a_cpu_the_cache_has_a_ceiling_unless_one_request_needs_more():
    roomy = device(free_bytes=100_000 * MIB)
    many = core_config(max_num_seqs=4000)
    assert plan_cache(many, [roomy]).num_blocks == CPU_CACHE_CEILING_BYTES // MIB
    long = core_config(max_num_seqs=4000, max_model_len=4 * 10_000)
    assert plan_cache(long, [roomy]).num_blocks == 10_000
    asked = core_config(max_num_seqs=4000, kv_cache_memory_bytes=50_000 * MIB)
    assert plan_cache(asked, [roomy]).num_blocks == 50_000


def test_auto_length_is_the_longest_that_fits():
    plan = plan_cache(on_gpu(max_model_len=100_000, fits_model_len=True), [device()])
    assert (plan.num_blocks, plan.max_model_len) == (500, 2000)
    assert plan_cache(on_gpu(max_model_len=100, fits_model_len=True), [device()]).max_model_len == 100


FLAGS = {
    "--max-model-len": ("max_model_len", int),
    "--gpu-memory-utilization": ("gpu_memory_utilization", float),
    "--num-gpu-blocks-override": ("num_blocks_override", int),
    "--kv-cache-memory-bytes": ("kv_cache_memory_bytes", int),
}


@pytest.mark.parametrize(
    ("changes", "facts", "flags"),
    [
        ({"max_model_len": 2004}, device(), {"--gpu-memory-utilization", "--max-model-len"}),
        ({"max_model_len": 40_000}, device(), {"--max-model-len"}),
        ({"gpu_memory_utilization": 0.3}, device(), {"--gpu-memory-utilization"}),
        ({"num_blocks_override": 3}, device(), {"--num-gpu-blocks-override", "--max-model-len"}),
        ({"kv_cache_memory_bytes": 5 * MIB}, device(), {"--kv-cache-memory-bytes", "--max-model-len"}),
        ({"kv_cache_memory_bytes": 5}, device(), {"--kv-cache-memory-bytes"}),
    ],
)
def test_every_flag_the_error_names_makes_it_fit(changes, facts, flags):
    config = msgspec.structs.replace(on_gpu(), **changes)
    with pytest.raises(NotEnoughMemoryError) as caught:
        plan_cache(config, [facts])
    advice = dict(re.findall(r"(--[a-z-]+) ([0-9.]+)", caught.value.hint))
    assert advice.keys() == flags
    for flag, value in advice.items():
        field, kind = FLAGS[flag]
        plan_cache(msgspec.structs.replace(config, **{field: kind(value)}), [facts])


def test_a_model_that_does_not_fit_at_all_says_how_much_is_missing():
    with pytest.raises(NotEnoughMemoryError) as caught:
        plan_cache(on_gpu(dtype="float32"), [device(weights_bytes=2000 * MIB)])
    assert caught.value.hint == "free 1.19 GiB more memory, or use --dtype bfloat16 or a smaller model"
    assert caught.value.phase == "planning the KV cache"


def test_the_table_adds_up():
    config = on_gpu()
    table = memory_table(config, [device()], plan_cache(config, [device()]))
    assert table.splitlines() == [
        "memory of worker 0 (cpu):",
        "  weights               300.0 MiB",
        "  activations (peak)    100.0 MiB",
        "  KV cache              500.0 MiB",
        "  reserve               100.0 MiB",
        "  free at start        1000.0 MiB",
        "KV cache limited by: --gpu-memory-utilization 0.9 of the memory, or what is free of it",
        "KV cache size: 2,000 tokens, 262,144 bytes each",
        "Maximum concurrency for 64 tokens per request: 31.25x",
    ]


@pytest.mark.parametrize(
    ("changes", "free_mib", "reason"),
    [
        ({"max_num_seqs": 2}, 1000, "--max-num-seqs requests of --max-model-len tokens need no more"),
        ({"max_num_seqs": 4000}, 100_000, "at most 4.00 GiB on a CPU unless --kv-cache-memory-bytes asks for more"),
        ({"max_num_seqs": 4000}, 1000, "--gpu-memory-utilization 0.92 of the memory that is free"),
        ({"num_blocks_override": 99}, 1000, "--num-gpu-blocks-override"),
        ({"kv_cache_memory_bytes": 99 * MIB}, 1000, "--kv-cache-memory-bytes"),
    ],
)
def test_the_table_says_what_limits_the_cache(changes, free_mib, reason):
    config, facts = core_config(**changes), [device(free_bytes=free_mib * MIB)]
    assert f"KV cache limited by: {reason}" in memory_table(config, facts, plan_cache(config, facts)).splitlines()


def test_graphs_without_which_a_request_would_fit_are_named_with_the_switch():
    facts = device(graph_bytes=100 * MIB)
    with pytest.raises(NotEnoughMemoryError, match=r"and 100\.0 MiB of CUDA graphs") as caught:
        plan_cache(on_gpu(max_model_len=2000), [facts])
    assert "--enforce-eager" in caught.value.hint
    assert plan_cache(on_gpu(max_model_len=2000), [device()]).num_blocks == 500
    with pytest.raises(NotEnoughMemoryError) as caught:
        plan_cache(on_gpu(max_model_len=2004), [facts])
    assert "--enforce-eager" not in caught.value.hint


def gemma_like(window: int, num_full: int, num_windowed: int) -> list[CacheGroupSpec]:
    """Groups of one layer of 1 KiB a token."""
    full = CacheGroupSpec(num_layers=1, block_bytes=16 * 1024)
    windowed = CacheGroupSpec(kind="window", window=window, num_layers=1, block_bytes=16 * 1024)
    return [full] * num_full + [windowed] * num_windowed


@pytest.mark.parametrize("num_tokens", [2048, 8192])
def test_windows_in_five_of_six_layers_take_a_quarter_of_the_memory_at_32k_tokens(num_tokens: int):
    # However large steps are, one request gets no more than 2,048 tokens of one.
    config = core_config(block_size=16, max_model_len=32768, max_num_batched_tokens=num_tokens, max_num_seqs=1)
    facts = [device(cache_groups=gemma_like(1024, 1, 5))]
    plan = plan_cache(config, facts)
    full = plan_cache(config, [device(cache_groups=gemma_like(1024, 6, 0))])
    assert plan.num_blocks * 4 <= full.num_blocks == 6 * 2048
    # On a CPU there is room for `max_num_seqs` requests, and here for nothing more.
    assert (plan.num_blocks, plan.max_concurrency, plan.num_tokens) == (2048 + 5 * 193, 1.0, 32768)
    table = memory_table(config, facts, plan)
    assert f"{'full':<20} {'32.0 MiB':>10}  1 layers in 1 group\n" in table
    assert f"{'window of 1,024':<20} {'15.1 MiB':>10}  5 layers in 5 groups\n" in table
    assert "24.5 % of full attention in every layer" in table


def test_the_table_of_groups_is_about_one_worker_whatever_a_later_stage_has():
    config = core_config(block_size=16, max_model_len=32768, max_num_seqs=1)
    larger = [msgspec.structs.replace(spec, num_layers=2, block_bytes=32 * 1024) for spec in gemma_like(1024, 1, 5)]
    facts = [device(cache_groups=gemma_like(1024, 1, 5)), device(rank=1, cache_groups=larger)]
    table = memory_table(config, facts, plan_cache(config, facts))
    assert "KV cache of a request of 32,768 tokens on worker 0:" in table
    assert f"{'full':<20} {'32.0 MiB':>10}  1 layers in 1 group\n" in table


def test_a_length_that_fits_is_found_where_windows_keep_only_a_part():
    groups = gemma_like(64, 1, 2)
    config = on_gpu(block_size=16, max_model_len=8192, max_num_batched_tokens=16, num_blocks_override=100)
    # A window and the tokens of a step touch six blocks at most, in each of two groups.
    plan = plan_cache(msgspec.structs.replace(config, fits_model_len=True), [device(cache_groups=groups)])
    assert plan.max_model_len == (100 - 2 * 6) * 16
    with pytest.raises(NotEnoughMemoryError, match="needs 524 KV blocks"):
        plan_cache(config, [device(cache_groups=groups)])


def state(num_bytes: int) -> CacheGroupSpec:
    return CacheGroupSpec(kind="state", num_layers=3, block_bytes=num_bytes)


KEYS = CacheGroupSpec(num_layers=1, block_bytes=16 * 1024)


def test_states_take_at_most_half_of_the_memory_of_a_hybrid():
    config = core_config(block_size=16, max_model_len=1024, max_num_seqs=100, kv_cache_memory_bytes=100 * MIB)
    plan = plan_cache(config, [device(cache_groups=[KEYS, state(2 * MIB)])])
    assert plan.blocks_per_group == [50 * 64, 25]
    assert (plan.num_states, plan.max_request_states, plan.kv_cache_bytes) == (25, 2, 100 * MIB)
    assert plan.max_concurrency == 12.5
    table = memory_table(config, [device(cache_groups=[KEYS, state(2 * MIB)])], plan)
    assert f"{'states':<20} {'50.0 MiB':>10}" in table
    assert f"{'2 states':<20} {'4.0 MiB':>10}  3 layers, checkpoints 256 tokens apart" in table


def test_states_take_all_of_the_memory_if_nothing_else_does_but_no_more_than_requests_use():
    facts = [device(cache_groups=[state(MIB)])]
    plan = plan_cache(core_config(max_num_seqs=300), facts)
    assert (plan.blocks_per_group, plan.num_blocks, plan.num_states) == ([520], 520, 520)
    few = core_config(max_num_seqs=8)
    plan = plan_cache(few, facts)
    assert plan.num_states == 8 * 4
    assert "--max-num-seqs requests of --max-model-len tokens need no more" in memory_table(few, facts, plan)
    assert plan_cache(core_config(enable_prefix_caching=False), facts).num_states == 8
    assert plan_cache(core_config(num_blocks_override=5), facts).num_states == 5


def test_too_little_memory_for_one_state_is_refused_with_a_remedy_that_works():
    facts = [device(cache_groups=[state(400 * MIB)])]
    with pytest.raises(NotEnoughMemoryError, match=r"needs 2 states \(800.0 MiB\)"):
        plan_cache(core_config(), facts)
    assert plan_cache(core_config(enable_prefix_caching=False), facts).num_states == 1
    for groups in ([KEYS, state(MIB)], [state(MIB)]):
        config = core_config(block_size=16, max_model_len=1024, kv_cache_memory_bytes=MIB)
        with pytest.raises(NotEnoughMemoryError) as caught:
            plan_cache(config, [device(cache_groups=groups)])
        (need_bytes,) = re.findall(r"--kv-cache-memory-bytes (\d+)", caught.value.hint)
        enough = msgspec.structs.replace(config, kv_cache_memory_bytes=int(need_bytes))
        assert plan_cache(enough, [device(cache_groups=groups)]).max_model_len == 1024


def test_on_a_cpu_the_states_of_32_requests_may_exceed_the_ceiling():
    config = core_config(block_size=16, max_model_len=1024, max_num_seqs=256)
    pure, hybrid = (
        [device(cache_groups=groups, free_bytes=100_000 * MIB)]
        for groups in ([state(263 * MIB)], [KEYS, state(263 * MIB)])
    )
    plan = plan_cache(config, pure)
    assert plan.num_states == 64
    assert "at most 4.00 GiB, or the states of 32 requests, on a CPU" in memory_table(config, pure, plan)
    assert plan_cache(config, hybrid).blocks_per_group == [256 * 64, 64]


def test_a_stage_whose_layers_have_states_only_does_not_limit_the_blocks_of_the_others():
    config = core_config(block_size=16, max_model_len=1024, max_num_seqs=100, kv_cache_memory_bytes=100 * MIB)
    none = CacheGroupSpec(num_layers=0, block_bytes=0)
    stages = [device(cache_groups=[none, state(40 * MIB)]), device(rank=1, cache_groups=[KEYS, state(MIB)])]
    plan = plan_cache(config, stages)
    assert plan.num_states == 2
    assert plan.num_blocks == (100 - 2) * 64
    assert plan.cache_groups[-1].window == 512


def test_host_memory_is_divided_among_the_workers():
    config, facts = on_gpu(kv_offloading_bytes=100 * MIB), [device(), device(rank=1)]
    plan = plan_cache(config, facts)
    assert (plan.num_host_blocks, plan.host_block_bytes) == (50, 2 * MIB)
    assert f"{'offloaded blocks':<20} {'50.0 MiB':>10}" in memory_table(config, facts, plan)
    assert plan_cache(on_gpu(), facts).num_host_blocks == 0
    with pytest.raises(NotEnoughMemoryError, match=r"one KV block takes 2.0 MiB.*1.0 MiB"):
        plan_cache(on_gpu(kv_offloading_bytes=MIB), facts)


def test_host_memory_is_divided_between_blocks_and_checkpoints():
    hybrid = [device(cache_groups=[KEYS, state(8 * MIB)], host_block_s=0.25)]
    config = on_gpu(kv_offloading_bytes=400 * MIB)
    plan = plan_cache(config, hybrid)
    num_blocks = plan.cache_groups[-1].window // config.block_size
    assert plan.host_state_bytes == 8 * MIB
    assert plan.host_state_s == 0.25 * 8 * MIB / hybrid[0].kv_block_bytes
    assert abs(plan.num_host_states - 2 * plan.num_host_blocks / num_blocks) <= 1, "two checkpoints for each interval"
    taken = plan.num_host_states * 8 * MIB + plan.num_host_blocks * plan.host_block_bytes
    assert 0 <= 400 * MIB - taken < plan.host_block_bytes
    assert "offloaded states" in memory_table(config, hybrid, plan)
    with pytest.raises(NotEnoughMemoryError, match=r"one recurrent state takes 8.0 MiB, but .* is 8.0 MiB"):
        plan_cache(on_gpu(kv_offloading_bytes=8 * MIB), hybrid)
    states_only = plan_cache(config, [device(cache_groups=[state(8 * MIB)])])
    assert (states_only.num_host_blocks, states_only.num_host_states) == (0, 50)
    assert plan_cache(on_gpu(enable_prefix_caching=False, kv_offloading_bytes=400 * MIB), hybrid).num_host_states == 0
    files = plan_cache(on_gpu(kv_offloading_path="/files"), hybrid)
    assert (files.num_host_blocks, files.num_host_states) == (0, 32), "states from files arrive there"
    assert "staging for files     128.0 MiB" in memory_table(on_gpu(kv_offloading_path="/files"), hybrid, files)
    for size in (9 * MIB, 60 * MIB, 400 * MIB):
        both = plan_cache(on_gpu(kv_offloading_path="/files", kv_offloading_bytes=size), hybrid)
        taken = both.num_host_states * 8 * MIB + both.num_host_blocks * both.host_block_bytes
        assert both.num_host_blocks and 0 <= size - taken < both.host_block_bytes, "no more than was asked for"


@pytest.mark.parametrize("groups", [[KEYS], [KEYS, state(8 * MIB)]])
@pytest.mark.parametrize("changes", [{"kv_offloading_bytes": 200 * MIB}, {"kv_offloading_path": "/files"}])
def test_on_a_cpu_the_cache_and_what_is_kept_in_host_memory_fit_together(groups, changes):
    config = core_config(max_num_seqs=4000, gpu_memory_utilization=1.0, **changes)
    facts = device(cache_groups=groups)
    plan = plan_cache(config, [facts])
    (reserve,) = re.findall(r"reserve +(-?[0-9.]+) MiB", memory_table(config, [facts], plan))
    assert 0 <= float(reserve) < 16, "one block and one state"


def test_host_memory_without_which_a_cpu_would_have_room_is_named():
    with pytest.raises(NotEnoughMemoryError, match="offloaded contents and files") as caught:
        plan_cache(core_config(kv_offloading_bytes=590 * MIB), [device()])
    assert "use a smaller --kv-offloading-size" in caught.value.hint


def test_the_slowest_worker_decides_what_a_copy_takes():
    facts = [device(host_block_s=0.25), device(rank=1, host_block_s=0.5)]
    assert plan_cache(on_gpu(kv_offloading_bytes=100 * MIB), facts).host_block_s == 0.5
