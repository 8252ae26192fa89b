"""Builds the executor of a loaded model on any device: the entry point for the worker and for benchmarks."""

from collections.abc import Sequence

from torch import Tensor

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.config.offloading import MIN_STAGING_ROWS, MIN_STATE_STAGING_ROWS, num_staging_rows
from octavo.protocol.kv_connector import KVConnectorRole
from octavo.protocol.kv_connector_loading import open_kv_connector
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.cache.block_files import BlockFiles
from octavo.worker_proc.cache.block_loader import ContentStore
from octavo.worker_proc.cache.connector_store import ConnectorStore
from octavo.worker_proc.cache.content_files import ContentFiles
from octavo.worker_proc.cache.host_blocks import HostBlocks
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.executor.executor import PipelinedExecutor
from octavo.worker_proc.executor.runner import Deliver, Runner
from octavo.worker_proc.lora.loader import AdapterLoader
from octavo.worker_proc.media.aligner import Aligner
from octavo.worker_proc.media.open import open_encoder
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.pooling.pooler import Pooler
from octavo.worker_proc.runners.host import HostRunner
from octavo.worker_proc.runners.registry import open_runner
from octavo.worker_proc.sampling.processors import Processors
from octavo.worker_proc.speculation.open import open_drafter


# long: each part that a step may use, one after another
def open_executor(
    model: Model,
    config: ResolvedConfig,
    stream: Stream | None,
    deliver: Deliver,
    *,
    num_blocks: int,
    max_model_len: int,
    num_states: int = 0,
    num_host_blocks: int = 0,
    num_host_states: int = 0,
    rank: int = 0,
    processors: Processors | None = None,
    adapters: AdapterLoader | None = None,
) -> PipelinedExecutor:
    """Make the cache and an empty batch.

    Args:
        model: model with its weights on the device; shared, not copied.
        config: sizes of a step and of a block, types.
        stream: stream of the device; `None` if the host computes.
        deliver: takes the result of each plan, in order. Called from within the methods of the executor.
        num_blocks: number of blocks of the cache.
        max_model_len: longest request, in tokens.
        num_states: number of slots for recurrent states.
        num_host_blocks: number of blocks in host memory, for the contents of evicted blocks.
        num_host_states: number of slots in host memory, for evicted checkpoints of recurrent states.
        rank: rank, part of the names of its block files.
        processors: logits processors.
        adapters: fills the slots of LoRA adapters; `None` if the engine has none.

    Raises:
        MemoryError, RuntimeError: not enough memory.
    """
    runner = open_runner(
        model, config, stream, num_blocks=num_blocks, max_model_len=max_model_len, num_states=num_states
    )
    batch = _open_batch(model, config, runner, max_model_len)
    pooler = Pooler(config.model.pooling, model.pooling_head) if config.model.pooling and model.stage.is_last else None
    drafter = open_drafter(model, config, runner, stream, batch, num_blocks=num_blocks, max_model_len=max_model_len)
    buffers = [*runner.cache_buffers, *(drafter.cache_buffers if drafter else ())]
    store = _open_store(config, rank)

    def open_host_blocks(buffers: Sequence[Tensor], num_blocks: int, num_host_blocks: int, min_rows: int) -> HostBlocks:
        num_rows = 0
        if store is not None:
            block_bytes = sum(buffer.nbytes for buffer in buffers) // max(1, num_blocks)
            num_rows = num_staging_rows(block_bytes, min_rows)
        library, num_threads = model.library, config.num_threads
        return HostBlocks(buffers, num_blocks, num_host_blocks, library, num_threads, stream, num_staging_rows=num_rows)

    host_blocks, host_states, states = None, None, runner.state_buffers
    if num_host_blocks or store is not None:
        host_blocks = open_host_blocks(buffers, num_blocks, num_host_blocks, MIN_STAGING_ROWS)
    if num_host_states:
        host_states = open_host_blocks(states, num_states, num_host_states, MIN_STATE_STAGING_ROWS)
    executor = PipelinedExecutor(
        batch,
        runner,
        deliver,
        processors,
        adapters,
        pooler,
        host_blocks=host_blocks,
        host_states=host_states,
        store=store,
        drafter=drafter,
        encoder=open_encoder(model, config, stream),
        aligner=_open_aligner(model, runner),
        repeater=runner if isinstance(runner, HostRunner) else None,
        is_last_stage=model.stage.is_last,
    )
    if config.kv_transfer is not None:
        executor.block_files = BlockFiles(
            buffers, num_blocks, states, num_states, library=model.library, num_threads=config.num_threads
        )
    return executor


def _open_aligner(model: Model, runner: Runner) -> Aligner | None:
    if model.cross_cache is None or not isinstance(runner, HostRunner):
        return None  # a GPU keeps no queries, and alignment requests are refused
    return Aligner(runner.forward, model.cross_cache, model.library)


def _open_store(config: ResolvedConfig, rank: int) -> ContentStore | None:
    if config.kv_connector is not None:
        return ConnectorStore(open_kv_connector(config, KVConnectorRole.WORKER, rank))
    return ContentFiles(rank) if config.kv_offloading_path else None


def _open_batch(model: Model, config: ResolvedConfig, runner: Runner, max_model_len: int) -> BatchState:
    return BatchState(
        num_slots=config.max_num_seqs,
        max_model_len=max_model_len,
        block_size=config.block_size,
        vocab_size=config.model.vocab_size,
        num_groups=len(model.cache_groups),
        has_block_tables=runner.reads_block_tables,
        has_states=model.state_group is not None,
        num_adapters=model.adapter_rows.num_slots if model.adapter_rows else 0,
        segment_stride=model.segment_stride,
        has_axes=model.step_angles is not None,
        cross_inputs=model.cross_cache.inputs if model.cross_cache else None,
    )
