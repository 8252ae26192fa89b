"""Makes what computes the steps of a loaded model, on whichever device it is: the seam for worker and benchmark."""

from octavo.protocol.config import ResolvedConfig
from octavo.worker_proc.device.base import Device
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.step.execute import StepExecutor
from octavo.worker_proc.step.steps import Deliver, HostSteps, Steps


def open_steps(
    model: Model, config: ResolvedConfig, device: Device, deliver: Deliver, *, num_blocks: int, max_model_len: int
) -> Steps:
    """Make the cache and an empty batch.

    Args:
        model: with its weights on the device.
        config: sizes of a step and of a block, types.
        device: which computes.
        deliver: takes the result of each plan, in order; called from within the methods of the steps.
        num_blocks: of the cache.
        max_model_len: longest request, in tokens.

    Raises:
        MemoryError, RuntimeError: there is no memory for it.
    """
    stream = device.stream()
    if stream is None:
        executor = StepExecutor.build(model, config, num_blocks=num_blocks, max_model_len=max_model_len)
        return HostSteps(executor, deliver)
    from octavo.worker_proc.pipeline.build import build_pipeline  # needs Triton

    pipeline = build_pipeline(model, config, stream, deliver, num_blocks=num_blocks, max_model_len=max_model_len)
    return pipeline.executor
