"""Joins this worker to the other ranks, by the means that its device has."""

from octavo.kernels.all_reduce.native import exchanged_bytes
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.rank_group import SharedMemoryGroup
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.control import WorkerSpec
from octavo.protocol.errors import StartupError
from octavo.worker_proc.executor.runner import PROMPT_LOGPROBS_ROWS
from octavo.worker_proc.parallel.distributed import DistributedRanks
from octavo.worker_proc.parallel.group import SharedMemoryRanks, TensorParallelGroup


def join_group(spec: WorkerSpec, library: NativeLibrary | None) -> TensorParallelGroup:
    """Return the group of all ranks.

    Args:
        spec: of this worker.
        library: computes with the model; None: torch does.

    Raises:
        StartupError: the ranks cannot exchange anything.
    """
    if library is None:
        return DistributedRanks(spec.config.device, spec.rendezvous, spec.rank, spec.world_size)
    try:
        group = SharedMemoryGroup(library, spec.exchange_fd, spec.rank, spec.world_size, _area_bytes(spec.config))
    except OSError as error:
        raise StartupError(f"no memory to share with the other workers: {error}", hint="free some memory") from error
    return SharedMemoryRanks(group)


def _area_bytes(config: ResolvedConfig) -> int:
    """Return the bytes of the largest exchange: the hidden states of a full step, or all logits of one."""
    model = config.model.hf_config
    width = max(int(model.get(key) or 0) for key in ("hidden_size", "n_embd", "word_embed_proj_dim"))
    max_logits = max(config.max_num_seqs, PROMPT_LOGPROBS_ROWS)
    return max(
        exchanged_bytes(config.max_num_batched_tokens, width, config.world_size),
        max_logits * config.model.vocab_size * 4,
    )
