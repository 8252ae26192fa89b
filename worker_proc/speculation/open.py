"""Makes the drafter of a model, if it has one: the entry point for the executor."""

from octavo.protocol.config import ResolvedConfig
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.executor.runner import Runner
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.heads.base import DraftHead
from octavo.worker_proc.speculation.draws import Drafter
from octavo.worker_proc.speculation.head_drafter import open_head_drafter
from octavo.worker_proc.speculation.model_drafter import open_model_drafter


def open_drafter(
    model: Model,
    config: ResolvedConfig,
    runner: Runner,
    stream: Stream | None,
    batch: BatchState,
    *,
    num_blocks: int,
    max_model_len: int,
) -> Drafter | None:
    """Make the cache of the draft model or head, and the drafter; `None` if there is no drafter.

    Args:
        model: model with loaded weights, including those of its head or draft model.
        config: engine configuration.
        runner: runner of the model.
        stream: stream of the device; `None` if the host computes.
        batch: batch of the runner.
        num_blocks: number of blocks of the cache.
        max_model_len: longest request, in tokens.

    Raises:
        ConfigError: no layer of the model keeps blocks of all tokens of a request.
        MemoryError, RuntimeError: not enough memory for the cache.
    """
    sizes = {"num_blocks": num_blocks, "max_model_len": max_model_len}
    if isinstance(head := model.head, DraftHead):
        return open_head_drafter(model, head, config, runner, stream, batch, **sizes)
    return None if head is None else open_model_drafter(model, head, config, runner, stream, batch, **sizes)
