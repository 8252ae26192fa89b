"""Makes the runner of a GPU, and measures the memory of its steps. Imports Triton."""

import contextlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
import torch

from octavo.kernels.paged_attention.gpu import StepAttention
from octavo.kernels.paged_attention.gpu_plan import SEGMENT, Limits
from octavo.kernels.paged_attention.gpu_prefixes import SegmentLabels
from octavo.kernels.paged_attention.shape import AttentionShape
from octavo.kernels.sample.table import SamplingWidths
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import NotEnoughMemoryError
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import StepPlan
from octavo.worker_proc.attention.paged import PagedCacheAttention
from octavo.worker_proc.attention.spans import SpanAttention
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.cache.layout import torch_storage
from octavo.worker_proc.cache.states import StateStorage, open_states
from octavo.worker_proc.cache.storage import KVStorage
from octavo.worker_proc.device.base import Device
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.executor.executor import PipelinedExecutor
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.parallel.stage_links import GraphStages
from octavo.worker_proc.pooling.pooler import Pooler
from octavo.worker_proc.runners.cuda_graphs.cross_table import CrossTable
from octavo.worker_proc.runners.cuda_graphs.forward import GraphForward
from octavo.worker_proc.runners.cuda_graphs.graphs import StepGraphs
from octavo.worker_proc.runners.cuda_graphs.metadata import StepSize
from octavo.worker_proc.runners.cuda_graphs.rounds import DeviceRounds, DraftGraphs
from octavo.worker_proc.runners.cuda_graphs.runner import CudaGraphRunner
from octavo.worker_proc.runners.cuda_graphs.sizes import GraphKind, GraphSizes, UnpaddedRows
from octavo.worker_proc.runners.cuda_graphs.slot_table import GroupTable, SlotTable, Widths
from octavo.worker_proc.runners.cuda_graphs.step_buffer import StepBuffer
from octavo.worker_proc.runners.memory import POOLED_WHOLE, StepMemory, max_samples, prompts_plan
from octavo.worker_proc.speculation.draws import shared_group
from octavo.worker_proc.speculation.open import open_drafter

Graphs = TypeVar("Graphs", bound=StepGraphs)

MAX_PARTIAL_BYTES = 2**28
"""Memory limit for partial sums of rows over segments of keys in a step: 16,131 of them for 32 heads of 128
dimensions. For requests beyond the limit, fewer programs compute a request and no keys are shared: slower, with the
same bits."""

_MEASURED = SamplingSpec(
    max_tokens=1,
    seed=0,
    temperature=1.0,
    top_k=50,
    logprobs=1,
    logprobs_mode="processed_logprobs",
    logprob_token_ids=(0,),
)
"""The requests of the step that takes the most memory. In the decode each has a token mask too."""


def open_runner(
    model: Model,
    config: ResolvedConfig,
    stream: Stream | None,
    *,
    num_blocks: int,
    max_model_len: int,
    num_states: int = 0,
) -> CudaGraphRunner:
    """See `octavo.worker_proc.runners.registry.RunnerModule`."""
    assert stream is not None, "a device that computes on its own"
    device, num_seqs, vocab_size = stream.torch_device, config.max_num_seqs, config.model.vocab_size
    model.prepare(max_model_len)
    groups = model.cache_groups
    storage = torch_storage(config, groups, num_blocks, device)
    max_seen = -(-min(vocab_size, max_model_len + 1) // 16) * 16  # one form of the kernels for all lengths
    blocks_each = -(-max_model_len // config.block_size)
    widths = Widths(SamplingWidths(mask_words=-(-vocab_size // 32)), max_seen, blocks_each, len(groups))
    labels = [SegmentLabels(num_seqs + 1, blocks_each, config.block_size, SEGMENT) for _ in groups]
    max_drafts = config.speculation.max_depth if config.speculation else 0
    table = SlotTable(num_seqs, widths, device, labels, max_drafts)
    states = open_states(model.state_group, num_states, device)
    cross = CrossTable.of(model.cross_cache, num_seqs) if model.cross_cache else None
    graphs = _open_graphs(model, config, stream, table, storage, states, max_model_len, StepGraphs, cross)
    changes_logits = bool(config.logits_processors) or cross is not None  # by the timestamp rule
    cache_bytes = storage.num_bytes + (states.num_bytes if states else 0)
    return CudaGraphRunner(
        table,
        graphs,
        stream,
        cache_bytes,
        storage.buffers,
        _max_size(config),
        model.given_rows,
        model.step_angles,
        cross,
        changes_logits=changes_logits,
        state_buffers=states.buffers if states else (),
    )


def open_rounds(
    model: Model,
    config: ResolvedConfig,
    runner: CudaGraphRunner,
    batch: BatchState,
    *,
    group: int,
    num_blocks: int,
    max_model_len: int,
) -> DeviceRounds:
    """See `octavo.worker_proc.runners.registry.open_rounds`."""
    model.prepare(max_model_len)
    storage = torch_storage(config, model.cache_groups, num_blocks, runner.stream.torch_device)
    table = GroupTable(runner.table, group)
    new_graphs = partial(DraftGraphs, block_size=config.block_size, vocab_size=config.model.vocab_size)
    graphs = _open_graphs(model, config, runner.stream, table, storage, None, max_model_len, new_graphs)
    forward = GraphForward(graphs, runner.stream, storage.buffers, _max_size(config))
    return DeviceRounds(model, forward, graphs, runner, table, runner.stream, group, batch)


def _open_graphs(
    model: Model,
    config: ResolvedConfig,
    stream: Stream,
    table: SlotTable | GroupTable,
    storage: KVStorage,
    states: StateStorage | None,
    max_model_len: int,
    new_graphs: Callable[..., Graphs],
    cross: CrossTable | None = None,
) -> Graphs:
    """Make the graphs of a model over its cache, and the buffers of their steps."""
    groups, device = model.cache_groups, stream.torch_device
    block_tables = [
        torch.zeros(config.max_num_seqs, block_ids_SP.shape[1], dtype=torch.int32, device=device)
        for block_ids_SP in table.block_ids
    ]
    attention = [
        StepAttention(group.shape, config.block_size, _limits(config, group.shape, max_model_len), block_table_RP)
        for group, block_table_RP in zip(groups, block_tables, strict=True)
    ]
    if cross is not None:
        limits = _limits(config, cross.cache.shape, cross.cache.num_keys)
        attention.append(StepAttention(cross.cache.shape, config.block_size, limits, cross.block_table_RP))
    num_words = sum(each.layout.num_words for each in attention)
    buffer = StepBuffer(stream, _max_size(config), num_words, len(groups), has_states=states is not None)
    start = 0
    for each in attention:
        each.words_W = buffer.attention_plan_W[start : start + each.layout.num_words]
        start += each.layout.num_words
    # Ranks exchange equally many rows, so sizes must not depend on the padding of cuBLAS on one of them.
    unpadded: UnpaddedRows = model.parameters.unpadded_rows if config.world_size == 1 else lambda size: size
    has_spans = config.model.media is not None and config.model.media.both_ways_rows > 0
    return new_graphs(
        model=model,
        layers=PagedCacheAttention(storage, groups, states, model.cache_scales, model.cross_cache),
        attention=attention,
        block_tables=block_tables,
        stream=stream,
        table=table,
        buffer=buffer,
        sizes=GraphSizes.of(_max_decode_rows(config), config.max_num_batched_tokens, unpadded),
        stages=model.exchange if isinstance(model.exchange, GraphStages) else None,
        plan_spans=partial(SpanAttention, groups, config.block_size, stream) if has_spans else None,
    )


def _max_size(config: ResolvedConfig) -> StepSize:
    return StepSize(config.max_num_batched_tokens, config.max_num_seqs, max_samples(config))


@torch.inference_mode()
def measure(model: Model, device: Device, config: ResolvedConfig) -> StepMemory:
    """Run the largest prefill and the largest decode, and capture two graphs of each kind.

    Memory of steps that does not depend on the number of blocks counts as activations. All graphs share their memory,
    most of which the largest graph takes. The cost of a further graph is measured on the second of each kind and
    counted for each of the others.
    """
    stream = device.stream()
    try:
        return StepMemory(_activation_bytes(model, device, stream, config), _graph_bytes(model, device, stream, config))
    except torch.OutOfMemoryError as error:
        raise NotEnoughMemoryError(
            f"a step does not fit in memory beside the weights: {error}",
            hint="use a smaller --max-num-batched-tokens, --max-num-seqs or --max-model-len",
        ) from error


def _activation_bytes(model: Model, device: Device, stream: Stream | None, config: ResolvedConfig) -> int:
    """Run a prefill step, and a step in which every request decodes. All stages run them together."""
    prompts = _prompt_lengths(config)
    blocks_each = -(-max(prompts) // config.block_size)
    num_groups, has_states = len(model.cache_groups), model.state_group is not None
    num_blocks = max(blocks_each * len(prompts), config.max_num_seqs, max_samples(config))
    device.reset_peak()
    eager = msgspec.structs.replace(config, max_graph_size=0)
    runner = open_runner(
        model,
        eager,
        stream,
        num_blocks=num_blocks,
        max_model_len=config.max_model_len,
        num_states=int(has_states),
    )
    batch = _new_batch(model, config)
    is_last_stage, pooling = model.stage.is_last, config.model.pooling
    pooler = Pooler(pooling, model.pooling_head) if pooling and is_last_stage else None
    sizes = {"num_blocks": num_blocks, "max_model_len": config.max_model_len}
    drafter = open_drafter(model, eager, runner, stream, batch, **sizes)
    cache_bytes = runner.cache_bytes + sum(buffer.nbytes for buffer in (drafter.cache_buffers if drafter else ()))
    with contextlib.closing(
        PipelinedExecutor(
            batch, runner, lambda result: None, pooler=pooler, drafter=drafter, is_last_stage=is_last_stage
        )
    ) as executor:
        new_plan = partial(prompts_plan, num_groups=num_groups, has_states=has_states)
        # A draft model computes the complete step once more.
        plan = new_plan(prompts, POOLED_WHOLE if pooling else _MEASURED, blocks_each)
        executor.begin(msgspec.structs.replace(plan, num_drafts=int(drafter is not None)))
        if pooling:
            executor.drain()
            return device.peak_growth_bytes() - cache_bytes
        decode = [1] * config.max_num_seqs
        released = range(len(prompts))
        plan = new_plan(decode, _MEASURED, 1, sequence=1, released=released)
        all_allowed = b"\xff" * (4 * -(-config.model.vocab_size // 32))
        masks = [(slot, 0, all_allowed) for slot in range(config.max_num_seqs)]
        executor.begin(msgspec.structs.replace(plan, awaits_masks=True), lambda: masks)
        executor.drain()
        if config.speculation is not None:
            executor.begin(_drafts_plan(config, new_plan))
            executor.drain()
        return device.peak_growth_bytes() - cache_bytes


def _new_batch(model: Model, config: ResolvedConfig) -> BatchState:
    return BatchState(
        num_slots=config.max_num_seqs,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        vocab_size=config.model.vocab_size,
        num_groups=len(model.cache_groups),
        has_block_tables=False,
        has_states=model.state_group is not None,
    )


def _drafts_plan(config: ResolvedConfig, new_plan: Callable[..., StepPlan]) -> StepPlan:
    """Return the plan after the decode. It samples the most tokens of any step, because it has drafts."""
    assert config.speculation is not None, "an engine that drafts"
    depth = config.speculation.max_depth
    num_requests = max(1, max_samples(config) // (1 + depth))
    blocks_each = -(-(1 + depth) // config.block_size)
    released = range(config.max_num_seqs)
    return new_plan([1] * num_requests, _MEASURED, blocks_each, sequence=2, released=released, num_draft_tokens=depth)


def _graph_bytes(model: Model, device: Device, stream: Stream | None, config: ResolvedConfig) -> int:
    """Capture the two largest graphs of each kind, and count the second for all that follow."""
    num_states = int(model.state_group is not None)
    runner = open_runner(model, config, stream, num_blocks=1, max_model_len=config.max_model_len, num_states=num_states)
    all_graphs = [runner.graphs]
    if model.head is not None:
        assert config.speculation is not None and config.speculation.head is not None, "the files of what drafts"
        max_len = min(config.max_model_len, config.speculation.head.max_position_embeddings)
        sizes = {"group": shared_group(model), "num_blocks": 1, "max_model_len": max_len}
        all_graphs.append(open_rounds(model.head, config, runner, _new_batch(model, config), **sizes).forward.graphs)
    num_bytes = 0
    for graphs, kind in itertools.product(all_graphs, GraphKind):
        missing = graphs.uncaptured(kind)
        for size, times in zip(missing[:2], (1, len(missing) - 1), strict=False):
            # Memory of the kernels' run before the capture is free again.
            free_bytes = device.free_bytes()
            graphs.capture(kind, size)
            num_bytes += times * max(0, free_bytes - device.free_bytes())
    return num_bytes


def _max_decode_rows(config: ResolvedConfig) -> int:
    """Return the most tokens of a decode graph, drafts included."""
    if not config.max_graph_size:
        return 0
    return max(config.max_graph_size, max_samples(config)) if config.speculation else config.max_graph_size


def _prompt_lengths(config: ResolvedConfig) -> list[int]:
    """Return the lengths of prompts that fill a step."""
    budget, longest = config.max_num_batched_tokens, config.max_model_len
    lengths = [longest] * (budget // longest) + ([budget % longest] if budget % longest else [])
    return lengths[: config.max_num_seqs]


def _limits(config: ResolvedConfig, shape: AttentionShape, max_model_len: int) -> Limits:
    partial_bytes = shape.num_heads * (shape.value_dim + 2) * torch.float32.itemsize
    max_partials = min(MAX_PARTIAL_BYTES // partial_bytes, config.max_num_seqs * -(-max_model_len // SEGMENT))
    return Limits(config.max_num_seqs, config.max_num_batched_tokens, max_partials)
