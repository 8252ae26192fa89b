"""Puts together what computes steps on a GPU. Imports Triton, and is imported where there is one."""

from dataclasses import dataclass

import torch

from octavo.kernels.paged_attention.gpu import StepAttention
from octavo.kernels.paged_attention.gpu_plan import SEGMENT, Limits
from octavo.kernels.paged_attention.shape import AttentionShape
from octavo.protocol.config import ResolvedConfig
from octavo.worker_proc.attention.paged import PagedCacheAttention
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.cache.layout import torch_storage
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.pipeline.executor import PipelinedExecutor
from octavo.worker_proc.pipeline.metadata import StepSize
from octavo.worker_proc.pipeline.runner import StepRunner
from octavo.worker_proc.pipeline.sizes import GraphSizes
from octavo.worker_proc.pipeline.slot_table import SlotTable, Widths
from octavo.worker_proc.pipeline.step_buffer import StepBuffer
from octavo.worker_proc.step.steps import Deliver

MAX_PARTIAL_BYTES = 2**28
"""Memory for the sums of rows over segments of keys that a step holds at once: 16,131 of them for 32 heads of 128
dimensions. What a step has beyond them is computed in another way, as right and slower."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """An executor and the size of its cache."""

    executor: PipelinedExecutor
    cache_bytes: int


def build_pipeline(
    model: Model, config: ResolvedConfig, stream: Stream, deliver: Deliver, *, num_blocks: int, max_model_len: int
) -> Pipeline:
    """Make the cache and an empty batch for a loaded model, on the host and on the device.

    Args:
        model: with its weights on the stream's device.
        config: sizes of a step and of a block, types, sizes of graphs.
        stream: of the device.
        deliver: takes the results.
        num_blocks: of the cache.
        max_model_len: longest request, in tokens.

    Raises:
        RuntimeError: there is no memory for it.
    """
    device, num_seqs, vocab_size = stream.torch_device, config.max_num_seqs, config.model.vocab_size
    model.prepare(max_model_len)
    storage = torch_storage(config, num_blocks, device)
    widths = Widths(seen=min(vocab_size, max_model_len + 1), blocks=-(-max_model_len // config.block_size))
    table = SlotTable(num_seqs, vocab_size, widths, device)
    block_table_RP = torch.zeros(num_seqs, widths.blocks, dtype=torch.int32, device=device)
    attention = StepAttention(
        model.attention_shape, config.block_size, _limits(config, model.attention_shape, max_model_len), block_table_RP
    )
    max_size = StepSize(config.max_num_batched_tokens, num_seqs, num_seqs)
    buffer = StepBuffer(stream, max_size, attention.layout.num_words)
    attention.words_W = buffer.plan_words_W
    runner = StepRunner(
        model,
        PagedCacheAttention(storage, model.attention_shape),
        attention,
        block_table_RP,
        stream,
        table,
        buffer,
        GraphSizes(config.max_graph_size),
    )
    state = BatchState(
        num_slots=num_seqs, max_model_len=max_model_len, block_size=config.block_size, vocab_size=vocab_size
    )
    return Pipeline(PipelinedExecutor(state, table, runner, stream, deliver), storage.num_bytes)


def _limits(config: ResolvedConfig, shape: AttentionShape, max_model_len: int) -> Limits:
    partial_bytes = shape.num_heads * (shape.head_dim + 2) * torch.float32.itemsize
    max_partials = min(MAX_PARTIAL_BYTES // partial_bytes, config.max_num_seqs * -(-max_model_len // SEGMENT))
    return Limits(config.max_num_seqs, config.max_num_batched_tokens, max_partials + config.max_num_seqs, max_partials)
