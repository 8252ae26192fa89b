"""The launches whose kernels are compiled ahead of time: every operation in the shapes of models in use.

Tensors have no data; the shapes are those of Llama-3.1-8B and Qwen3 unless noted.
"""

# long: one table, and what it launches

from collections.abc import Callable

import numpy as np
import quantized_launches
import torch
import triton
from compiled_kernels import ARCHITECTURES
from torch import Tensor

from octavo.kernels import programmatic_launch
from octavo.kernels.add_rms_norm import gpu as add_rms_norm
from octavo.kernels.all_reduce.gpu import OneShotAllReduce
from octavo.kernels.causal_conv1d import gpu as causal_conv1d
from octavo.kernels.copy_blocks import gpu as copy_blocks
from octavo.kernels.embedding import gpu as embedding
from octavo.kernels.experts import Activation, ExpertAdapters, PackedExperts
from octavo.kernels.experts import gpu as experts
from octavo.kernels.gated_delta_rule import DeltaWeights
from octavo.kernels.gated_delta_rule import gpu as gated_delta_rule
from octavo.kernels.gated_rms_norm import gpu as gated_rms_norm
from octavo.kernels.gelu import gpu as gelu
from octavo.kernels.given_rows import GIVEN
from octavo.kernels.given_rows import gpu as given_rows
from octavo.kernels.head_linear import gpu as head_linear
from octavo.kernels.latent_heads import LatentWidths
from octavo.kernels.latent_heads import gpu as latent_heads
from octavo.kernels.layer_norm import gpu as layer_norm
from octavo.kernels.linear import PackedLinear
from octavo.kernels.linear.gpu import LibraryLinear
from octavo.kernels.linear.gpu_product import InvariantLinear, TpInvariantLinear
from octavo.kernels.linear.gpu_tiles import H100, Gpu
from octavo.kernels.logprobs import gpu as logprobs
from octavo.kernels.logprobs.memory import LogprobsMemory
from octavo.kernels.lora import gpu as lora
from octavo.kernels.lora.rows import AdapterRows
from octavo.kernels.lora.shape import LoraShape
from octavo.kernels.multiply import gpu as multiply_rows
from octavo.kernels.paged_attention import AttentionShape, gpu_decode_plan, int8_cache
from octavo.kernels.paged_attention import gpu as paged_attention
from octavo.kernels.paged_attention.gpu_plan import Grid, Layout, Limits
from octavo.kernels.recurrence import DeviceSlots
from octavo.kernels.rms_norm import gpu as rms_norm
from octavo.kernels.rope import gpu as rope
from octavo.kernels.rope_store_kv import gpu as rope_store_kv
from octavo.kernels.rope_store_kv.rotation import QKNorm, Rotation
from octavo.kernels.routing import Routing, RoutingRule
from octavo.kernels.routing import gpu as routing
from octavo.kernels.sample import RequestTable, SamplingWidths
from octavo.kernels.sample import gpu as sample
from octavo.kernels.selective_scan import ScanWeights
from octavo.kernels.selective_scan import gpu as selective_scan
from octavo.kernels.sigmoid_and_mul import gpu as sigmoid_and_mul
from octavo.kernels.silu_and_mul import gpu as silu_and_mul
from octavo.kernels.slot_rows import gpu as slot_rows
from octavo.kernels.store_kv import gpu as store_kv
from octavo.kernels.varlen_attention import Parts
from octavo.kernels.varlen_attention import gpu as varlen_attention

BF16, F8, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
I32, I64, U8 = torch.int32, torch.int64, torch.uint8
VOCAB_SIZE = 151936


def empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return a tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def look_up() -> None:
    """Look up 8 tokens and their angles."""
    ids, angles = empty(8, dtype=I64), empty(40960, 64, dtype=F32)
    embedding.embeddings((ids, empty(VOCAB_SIZE, 4096)), (ids, angles), (ids, angles))


def give_rows() -> None:
    """Replace some of 8 rows by prompt embeddings."""
    given_rows.take_given_rows(empty(8, 4096), empty(8, dtype=I64), empty(8192, 4096), GIVEN)


def read_slots() -> None:
    """Read the last tokens and the block tables of 8 requests."""
    per_row = empty(8, dtype=I64)
    ids, table = empty(9, 2560, dtype=I32), empty(8, 2560, dtype=I32)
    last, drafts = empty(9, dtype=I64), empty(3, 9, dtype=I64)
    slot_rows.read_slots(per_row, per_row, last, drafts, per_row, [ids], [table])


def rewind_rows() -> None:
    """Take the rows of 8 requests back to before their first wrong draft, of 3."""
    rows, slots = empty(8, dtype=I64), empty(3, 9, dtype=I64)
    slot_rows.rewind_rows(slots, slots, empty(3, 8, dtype=I64), rows, rows, [rows, rows, rows, rows])


def advance_rows() -> None:
    """Move 8 requests to their next positions."""
    rows = empty(8, dtype=I64)
    slot_rows.advance_rows(rows, rows, rows, empty(9, dtype=I64), empty(9, 2560, dtype=I32), 16, [rows, rows])


def plan_decodes() -> None:
    """Plan a step of 8 decodes of 256, on an H200."""
    grid = Grid(chunk_tokens=32, split_tokens=4, shared_tokens=4, group=4, num_kv_heads=8, num_programs=264)
    layout = Layout.of(Limits(256, 8192, 16131), grid)
    words_W, lens_R = empty(layout.num_words, dtype=I32), empty(8, dtype=I64)
    gpu_decode_plan.plan_decodes(words_W, layout, grid, AttentionShape(32, 8, 128, 0.1), lens_R)


def swap_out() -> None:
    """Copy 4 blocks of 64 buffers, 32 KiB each."""
    cache, host = [empty(64, 32 << 10, dtype=U8)] * 64, [empty(64, 32 << 10, dtype=U8)] * 64
    copy_blocks.copy_blocks(cache, host, [(0, 1), (1, 2), (2, 3), (3, 0)])


def store_in_blocks_of(block_size: int) -> None:
    """Store 8 tokens' keys and values, 8 heads of 128."""
    cache = empty(64, block_size, 8, 128)
    store_kv.store_kv(empty(8, 8, 128), empty(8, 8, 128), cache, cache, empty(8, dtype=I64))


def empty_cache(num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return keys or values in blocks of 16 without data; integers with scales behind them."""
    if dtype == torch.int8:
        return int8_cache.levels_of(int8_cache.empty_cache(num_blocks, 16, num_kv_heads, head_dim, "meta"), 16)
    return empty(num_blocks, 16, num_kv_heads, head_dim, dtype=dtype)


def rotate_and_store(
    num_heads: int, num_kv_heads: int, head_dim: int, *, has_norm: bool, cache_dtype: torch.dtype = BF16
) -> None:
    """Rotate 8 tokens' heads, cut from one product, and store their keys and values in blocks of 16."""
    wide = empty(8, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = wide.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    angles = empty(8, head_dim // 2, dtype=F32)
    norm = QKNorm(empty(head_dim), empty(head_dim), 1e-6) if has_norm else None
    cache = empty_cache(64, num_kv_heads, head_dim, cache_dtype)
    rope_store_kv.rope_store_kv(q, k, v, Rotation(angles, angles, norm), cache, cache, empty(8, dtype=I64))


def add_adapters(num_rows: int, max_rank: int, num_workers: int = 1) -> None:
    """Add the adapters of 8 slots to the queries, keys and values of some rows; workers divide both factors."""
    parts = tuple(width // num_workers for width in (4096, 1024, 1024))
    shape = LoraShape(4096, parts, 8, max_rank, BF16, num_a_parts=num_workers)
    rows = AdapterRows(8)
    rows.slots_T = empty(num_rows, dtype=I64)
    exchange = (lambda sums: torch.cat([sums] * num_workers, 1)) if num_workers > 1 else None
    slots = lora.GpuLora(shape, torch.device("meta"), exchange)
    slots.add(empty(num_rows, 4096), empty(num_rows, sum(parts)), rows)


GPUS = {
    80: Gpu(108, 163 << 10, has_descriptors=False),
    90: H100,
    100: Gpu(148, 227 << 10, has_descriptors=True),
}


def multiply(num_rows: int, num_outputs: int = 4096, dtype: torch.dtype = BF16) -> None:
    """Multiply 4096 inputs with a weight and add a bias, without a library."""
    product_of(num_outputs, dtype)(empty(num_rows, 4096, dtype=dtype))


def multiply_gated(num_rows: int, num_outputs: int) -> None:
    """The same, and the activation."""
    product_of(num_outputs, BF16).silu_and_mul(empty(num_rows, 4096))


def multiply_segments(num_rows: int, num_ranks: int) -> None:
    """Multiply a rank's part of 14336 inputs with a weight of 4096 outputs, tp-invariant."""
    architecture = triton.runtime.driver.active.get_current_target().arch
    weight, bias = empty(4096, 14336 // num_ranks), empty(4096) if num_ranks == 1 else None
    product = TpInvariantLinear.new(weight, bias, GPUS[architecture]).in_segments(8, num_ranks)
    product(empty(num_rows, 14336 // num_ranks))


def early(launch: Callable[[], object]) -> Callable[[], object]:
    """Return a launch whose kernels may begin before the kernel ahead of them ends."""

    def launch_early() -> None:
        programmatic_launch.enable()
        try:
            launch()
        finally:
            programmatic_launch.enable(False)

    return launch_early


def product_of(num_outputs: int, dtype: torch.dtype) -> InvariantLinear:
    """Return the product with a weight of 4096 inputs."""
    architecture = triton.runtime.driver.active.get_current_target().arch
    weight, bias = empty(num_outputs, 4096, dtype=dtype), empty(num_outputs, dtype=dtype)
    return InvariantLinear.new(weight, bias, GPUS[architecture])


def attend(shape: AttentionShape, cache_dtype: torch.dtype = BF16, *, has_sinks: bool = False) -> None:
    """Attend for a decode and a chunk, with blocks of 16."""
    step = paged_attention.plan([0, 1, 201], [300, 200], empty(2, 64, dtype=I32), 16, shape)
    cache = empty_cache(64, shape.num_kv_heads, shape.head_dim, cache_dtype)
    sinks = empty(shape.num_heads, dtype=F32) if has_sinks else None
    values = cache if shape.key_value_dim is None else cache[..., : shape.value_dim]
    step(empty(201, shape.num_heads, shape.head_dim), cache, values, sinks_N=sinks)


def attend_to_parts(num_heads: int, head_dim: int, lengths: list[int]) -> None:
    """Attend within parts of a sequence, with queries, keys and values from one product."""
    qkv = empty(sum(lengths), 3, num_heads, head_dim)
    parts = Parts.of(np.array(lengths), lambda tiles: torch.from_numpy(tiles).to("meta"))
    varlen_attention.varlen_attention(qkv[:, 0], qkv[:, 1], qkv[:, 2], parts, 0.1)


def multiply_experts(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    width: int,
    inner: int,
    activation: Activation = "silu_and_mul",
    max_rank: int = 0,
) -> None:
    """Multiply tokens with their experts; with biases unless the activation is that of most models.

    `max_rank`: of adapters in 8 slots; 0: none.
    """
    has_bias = activation != "silu_and_mul"

    def weight(num_outputs: int, num_inputs: int, *, bias: bool) -> PackedLinear:
        product = LibraryLinear(empty(num_outputs, num_inputs), empty(num_outputs) if bias else None)
        return PackedLinear(num_inputs, num_outputs, BF16, torch.device("meta"), product)

    packed = PackedExperts(
        num_experts,
        [weight(inner, width, bias=has_bias)] * num_experts,
        [weight(inner, width, bias=has_bias)] * num_experts,
        [weight(width, inner, bias=False)] * num_experts,
        activation,
        empty(num_experts, width) if has_bias else None,
    )
    chosen = Routing(empty(num_tokens, top_k, dtype=I32), empty(num_tokens, top_k, dtype=F32))
    adapters = None
    if max_rank:
        sizes = [(width, (inner, inner)), (inner, (width,))]
        shapes = [LoraShape(inputs, parts, 8, max_rank, BF16, num_experts=num_experts) for inputs, parts in sizes]
        gates_and_ups, downs = (lora.GpuLora(shape, torch.device("meta")) for shape in shapes)
        adapters = ExpertAdapters(gates_and_ups, downs, AdapterRows(8))
        adapters.rows.slots_T = empty(num_tokens, dtype=I64)
    experts.experts(empty(num_tokens, width), chosen, packed, None, adapters)


def choose_experts_of_deepseek() -> None:
    """Choose 8 of 256 experts in 4 of 8 groups."""
    rule = RoutingRule(256, 8, "sigmoid", scale=2.5, num_groups=8, num_kept_groups=4, group_score="top2_sum")
    routing.route(empty(8, 256), rule, empty(256, dtype=F32))


def multiply_heads(num_tokens: int, num_inputs: int, num_outputs: int) -> None:
    """Multiply the 128 heads of DeepSeek-V3 with weights of their own."""
    product = LibraryLinear(empty(num_outputs, num_inputs), None)
    weight = PackedLinear(num_inputs, num_outputs, BF16, torch.device("meta"), product)
    head_linear.head_linear(empty(num_tokens, 128, max(num_inputs, 192)), [weight] * 128)


def make_latent_heads() -> None:
    """Make the queries and keys of 8 tokens of DeepSeek-V3."""
    latent, k_rotary = empty(8, 576).split([512, 64], dim=1)
    angles = empty(8, 32, dtype=F32)
    widths = LatentWidths(64, 128, 128, 512, is_interleaved=True)
    latent_heads.latent_heads(empty(8, 128, 192), empty(8, 128 * 512), latent, k_rotary, angles, angles, widths)


def store_latent() -> None:
    """Store 8 tokens' latent keys."""
    cache = empty(64, 16, 1, 576)
    store_kv.store_kv(empty(8, 1, 576), None, cache, cache[..., :512], empty(8, dtype=I64))


STATE_SLOTS = DeviceSlots(empty(5, dtype=I64), empty(4, dtype=I64), empty(4, dtype=I64))
"""Slots of four requests, which compute 8 tokens."""


def convolve(channels: int, width: int, *, has_silu: bool) -> None:
    """Convolve what is a part of wider rows."""
    rows, weight = empty(8, 2 * channels)[:, :channels], empty(channels, width)
    bias = empty(channels) if has_silu else None
    states = empty(9, width - 1, channels, dtype=F32)
    causal_conv1d.causal_conv1d(rows, weight, bias, states, STATE_SLOTS, has_silu=has_silu)


def scan(num_heads: int, head_dim: int, state_size: int, num_groups: int) -> None:
    """Scan what a convolution and a projection return."""
    x, b, c = empty(8, num_heads * head_dim + 2 * num_groups * state_size).split(
        [num_heads * head_dim, *[num_groups * state_size] * 2], dim=1
    )
    weights = ScanWeights(*[empty(num_heads, dtype=F32)] * 3)
    states = empty(9, num_heads, state_size, head_dim, dtype=F32)
    selective_scan.selective_scan(x, b, c, empty(8, num_heads), weights, states, STATE_SLOTS)


def apply_delta_rule() -> None:
    """Apply the rule of Qwen3-Next."""
    q, k, v = empty(8, 8192).split([2048, 2048, 4096], dim=1)
    weights = DeltaWeights(*[empty(32, dtype=F32)] * 2)
    states = empty(9, 32, 128, 128, dtype=F32)
    gated_delta_rule.gated_delta_rule(q, k, v, empty(8, 32), empty(8, 32), weights, states, STATE_SLOTS)


def gate_and_norm(width: int, num_groups: int, *, is_gate_first: bool) -> None:
    """Gate and normalize rows; with a weight for all groups unless the gate is first."""
    weight = empty(width if is_gate_first else width // num_groups)
    rows = empty(8, width)
    gated_rms_norm.gated_rms_norm(
        rows, rows, weight, 1e-5, num_groups=num_groups, is_gate_first=is_gate_first, num_segments=1, sums_TR=None
    )


def logits(num_rows: int = 8) -> Tensor:
    """Return rows of logits."""
    return empty(num_rows, VOCAB_SIZE, dtype=F32)


def sample_rows() -> None:
    """Sample 8 rows of bfloat16 logits, which a model may return, and count the tokens."""
    widths = SamplingWidths(biases=300, withheld=16, bad=64, seen=8192, mask_words=-(-VOCAB_SIZE // 32))
    table = RequestTable.allocate(8, widths, torch.device("meta"))
    per_row = empty(8, dtype=I64)
    reports = LogprobsMemory.allocate(8, torch.device("meta"))
    sample.sample_rows(empty(8, VOCAB_SIZE), table, per_row, per_row, per_row, largest=1e30, logprobs=reports)
    sample.record_tokens(table, per_row, per_row, per_row)


def rule_out_text() -> None:
    """Apply the rule of timestamps to 8 rows."""
    widths = SamplingWidths(mask_words=-(-VOCAB_SIZE // 32))
    table = RequestTable.allocate(8, widths, torch.device("meta"))
    per_row = empty(8, dtype=I64)
    sample.rule_out_text(logits(), table, per_row, per_row, per_row, first_timestamp=50_000, largest=1e30)


def add_up(size: int, *, has_norm: bool, part_dtype: torch.dtype = BF16) -> None:
    """Add up 8 rows of several ranks."""
    addresses, part = [0] * size, empty(8, 4096, dtype=part_dtype)
    layout = {"max_rows": 128, "width": 4096, "dtype": BF16, "part_dtype": part_dtype, "device": torch.device("meta")}
    ranks = OneShotAllReduce(addresses, 0, **layout)
    if has_norm:
        ranks.all_reduce_add_rms_norm(part, None, empty(8, 4096), empty(4096), 1e-5)
    else:
        ranks.all_reduce(part, empty(4096))


LAUNCHES: dict[str, Callable[[], object]] = {
    "all_reduce, 8 ranks": lambda: add_up(8, has_norm=False),
    "all_reduce and add_rms_norm, 3 ranks": lambda: add_up(3, has_norm=True),
    "all_reduce and add_rms_norm, 8 ranks": lambda: add_up(8, has_norm=True),
    "all_reduce and add_rms_norm, 8 ranks, tp-invariant": lambda: add_up(8, has_norm=True, part_dtype=F32),
    "add_rms_norm, 4096": lambda: add_rms_norm.add_rms_norm(empty(8, 4096), empty(8, 4096), empty(4096), 1e-5),
    "causal_conv1d, LFM2": lambda: convolve(2048, 3, has_silu=False),
    "causal_conv1d, Mamba-2": lambda: convolve(5376, 4, has_silu=True),
    "copy_blocks": swap_out,
    "embeddings, 4096 and 64": look_up,
    "given_rows, 4096": give_rows,
    "experts, 64 tokens, Qwen3-30B-A3B": lambda: multiply_experts(64, 128, 8, 2048, 768),
    "experts, 8192 tokens, Qwen3-30B-A3B": lambda: multiply_experts(8192, 128, 8, 2048, 768),
    "experts, 64 tokens, Qwen3-30B-A3B, adapters": lambda: multiply_experts(64, 128, 8, 2048, 768, max_rank=16),
    "experts, 64 tokens, GPT-OSS-20B": lambda: multiply_experts(64, 32, 4, 2880, 2880, "clamped_swiglu"),
    "gated_delta_rule, Qwen3-Next": apply_delta_rule,
    "gated_rms_norm, Mamba-2": lambda: gate_and_norm(5120, 1, is_gate_first=True),
    "gated_rms_norm, Qwen3-Next": lambda: gate_and_norm(4096, 32, is_gate_first=False),
    "gelu": lambda: gelu.gelu(empty(8, 3072), False),
    "gelu, tanh": lambda: gelu.gelu(empty(8, 3072), True),
    "head_linear, 64 tokens, keys of DeepSeek-V3": lambda: multiply_heads(64, 128, 512),
    "head_linear, 8192 tokens, values of DeepSeek-V3": lambda: multiply_heads(8192, 512, 128),
    "latent_heads, DeepSeek-V3": make_latent_heads,
    "layer_norm, 4096": lambda: layer_norm.layer_norm(empty(8, 4096), empty(4096), empty(4096), 1e-5),
    "linear, 64 rows, 4096 outputs": lambda: multiply(64),
    "linear, 128 rows, 4096 outputs": lambda: multiply(128),
    "linear, 8192 rows, 4096 outputs": lambda: multiply(8192),
    "linear, 64 rows, 28672 outputs": lambda: multiply(64, 28672),
    "linear, 8192 rows, 28672 outputs": lambda: multiply(8192, 28672),
    "linear and silu_and_mul, 64 rows, 4096 outputs": lambda: multiply_gated(64, 4096),
    "linear and silu_and_mul, 64 rows, 28672 outputs": lambda: multiply_gated(64, 28672),
    "linear and silu_and_mul, 8192 rows, 4096 outputs": lambda: multiply_gated(8192, 4096),
    "linear and silu_and_mul, 8192 rows, 28672 outputs": lambda: multiply_gated(8192, 28672),
    "linear, 8192 rows of float32": lambda: multiply(8192, dtype=F32),
    "linear, 64 rows, 8 segments": lambda: multiply_segments(64, num_ranks=1),
    "linear, 8192 rows, 8 segments": lambda: multiply_segments(8192, num_ranks=1),
    "linear, 8192 rows, 2 segments of 4 ranks": lambda: multiply_segments(8192, num_ranks=4),
    "linear, 8192 rows, a segment of 8 ranks": lambda: multiply_segments(8192, num_ranks=8),
    "linear, 64 rows, a segment of 8 ranks": lambda: multiply_segments(64, num_ranks=8),
    "logprobs and top_k": lambda: logprobs.logprobs_of_rows(logits(), empty(8, dtype=I64), 50),
    "lora, 64 rows, rank 16": lambda: add_adapters(64, 16),
    "lora, 64 rows, rank 64": lambda: add_adapters(64, 64),
    "lora, 64 rows, rank 16 of 2 workers": lambda: add_adapters(64, 16, 2),
    "multiply, LFM2": lambda: multiply_rows.multiply(empty(8, 2048), empty(8, 2048), has_silu=False),
    "paged_attention, heads of 64": lambda: attend(AttentionShape(32, 8, 64, 0.1)),
    "paged_attention, heads of 128": lambda: attend(AttentionShape(32, 8, 128, 0.1)),
    "paged_attention, heads of 256": lambda: attend(AttentionShape(8, 4, 256, 0.1)),
    "paged_attention, float8_e4m3fn": lambda: attend(AttentionShape(32, 8, 128, 0.1), torch.float8_e4m3fn),
    "paged_attention, int8": lambda: attend(AttentionShape(32, 8, 128, 0.1), torch.int8),
    "paged_attention, window and soft cap": lambda: attend(
        AttentionShape(32, 16, 128, 0.1, window=4096, soft_cap=50.0)
    ),
    "paged_attention, GPT-OSS": lambda: attend(AttentionShape(64, 8, 64, 0.1, window=128), has_sinks=True),
    "paged_attention, latent, 16 heads": lambda: attend(AttentionShape(16, 1, 576, 0.1, key_value_dim=512)),
    "paged_attention, latent, 128 heads": lambda: attend(AttentionShape(128, 1, 576, 0.1, key_value_dim=512)),
    "paged_attention, both directions, heads of 64": lambda: attend(AttentionShape(12, 12, 64, 0.1, is_causal=False)),
    "paged_attention, both directions, window": lambda: attend(
        AttentionShape(12, 12, 64, 0.1, window=128, is_causal=False)
    ),
    "paged_attention, images of Gemma 3": lambda: attend(AttentionShape(8, 4, 256, 0.1, window=1024, is_span=True)),
    "paged_attention, slopes": lambda: attend(AttentionShape(32, 32, 128, 0.1, slopes=(0.5,) * 32)),
    "rms_norm, 4096": lambda: rms_norm.rms_norm(empty(8, 4096), empty(4096), 1e-5),
    "rms_norm, 16384": lambda: rms_norm.rms_norm(empty(8, 16384), empty(16384), 1e-5),
    "rms_norm, heads of 128": lambda: rms_norm.rms_norm(empty(8, 32, 128), empty(128), 1e-6),
    "route, Qwen3-30B-A3B": lambda: routing.route(empty(8, 128), RoutingRule(128, 8), None),
    "route, DeepSeek-V3": choose_experts_of_deepseek,
    "rope, 32 heads of 128": lambda: rope.rope(empty(8, 32, 128), empty(8, 64, dtype=F32), empty(8, 64, dtype=F32)),
    "rope_store_kv, Llama-3.1-8B": lambda: rotate_and_store(32, 8, 128, has_norm=False),
    "rope_store_kv, Qwen2.5-7B": lambda: rotate_and_store(28, 4, 128, has_norm=False),
    "rope_store_kv, Qwen3-0.6B": lambda: rotate_and_store(16, 8, 128, has_norm=True),
    "rope_store_kv, Llama-3.2-1B": lambda: rotate_and_store(32, 8, 64, has_norm=False),
    "rope_store_kv, Qwen3-8B, cache of float8_e4m3fn": lambda: rotate_and_store(
        32, 8, 128, has_norm=True, cache_dtype=F8
    ),
    "rope_store_kv, Qwen3-8B, cache of int8": lambda: rotate_and_store(
        32, 8, 128, has_norm=True, cache_dtype=torch.int8
    ),
    "sample": sample_rows,
    "sample, the rule of timestamps": rule_out_text,
    "selective_scan, Falcon-H1": lambda: scan(24, 128, 256, 1),
    "selective_scan, Mamba-2": lambda: scan(80, 64, 128, 1),
    "sigmoid_and_mul, 2048": lambda: sigmoid_and_mul.sigmoid_and_mul(empty(8, 1), empty(8, 2048)),
    "silu_and_mul, 14336": lambda: silu_and_mul.silu_and_mul(empty(8, 2 * 14336)),
    "plan_decodes": plan_decodes,
    "slot_rows": read_slots,
    "slot_rows, advance": advance_rows,
    "slot_rows, rewind": rewind_rows,
    "store_kv, blocks of 16": lambda: store_in_blocks_of(16),
    "store_kv, latent": store_latent,
    "varlen_attention, CLIP": lambda: attend_to_parts(16, 64, [577]),
    "varlen_attention, SigLIP": lambda: attend_to_parts(16, 72, [729]),
    "varlen_attention, Qwen2-VL": lambda: attend_to_parts(16, 80, [1024]),
    "varlen_attention, windows of Qwen2.5-VL": lambda: attend_to_parts(16, 80, [64]),
    "varlen_attention, heads of 128": lambda: attend_to_parts(25, 128, [1025]),
}

LAUNCHES |= quantized_launches.LAUNCHES
EARLY = (
    "add_rms_norm, 4096",
    "linear, 64 rows, 4096 outputs",
    "linear and silu_and_mul, 64 rows, 28672 outputs",
    "quantized_linear, GPTQ, 16 rows",
    "quantized_linear, fp8, 16 rows",
    "rope_store_kv, Llama-3.1-8B",
    "silu_and_mul, 14336",
)
"""Kernels that may begin before the preceding kernel ends (programmatic dependent launch)."""
LAUNCHES |= {f"{name}, early": early(LAUNCHES[name]) for name in EARLY}

ONLY_ON: dict[str, tuple[int, ...]] = (
    {name: (90, 100) for name in LAUNCHES if "float8_e4m3fn" in name}
    | {name: (90,) for name in LAUNCHES if name.startswith("paged_attention,")}
    | {name: (90,) for name in LAUNCHES if name.endswith(", early")}
    | {name: (80, 90) for name in LAUNCHES if name.startswith("experts")}
    | {name: (90,) for name in LAUNCHES if name.startswith("varlen_attention,")}
    | {"varlen_attention, SigLIP": (80, 89, 90, 100)}
    | {"paged_attention, int8": (80, 89, 90)}
    | {"paged_attention, heads of 128": (*ARCHITECTURES, 120)}
    | {
        name: (80, 89, 90)
        for name in LAUNCHES
        if "latent" in name or "both directions, heads" in name or name.startswith(("head_linear", "lora"))
    }
    | quantized_launches.ONLY_ON
)
"""The architectures that some are compiled for, not all: an Ampere has no float8; attention takes seconds each, and its
tiles depend on the memory of a program, of which GPUs for desktops have less."""
