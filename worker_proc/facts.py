"""Measures what the core must know to plan the memory: weights, the peak of a step, the size of a block.

Plans nothing itself, and leaves nothing behind: the steps it runs have a cache and a batch of their own.
"""

import logging

import torch

from octavo.kernels.paged_attention import workspace_bytes
from octavo.protocol.config import DeviceFacts, ResolvedConfig
from octavo.protocol.errors import NotEnoughMemoryError
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import Admitted, Scheduled, StepPlan
from octavo.worker_proc.cache.layout import kv_block_bytes
from octavo.worker_proc.device.base import Device
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.step.execute import PROMPT_LOGPROBS_ROWS, StepExecutor
from octavo.worker_proc.step.forward import NativeForward, build_forward
from octavo.worker_proc.weights.load import torch_dtype

logger = logging.getLogger(__name__)

MEASURED_TOKENS = 128
"""Tokens of the step that is measured. Activations grow in proportion to tokens, so a larger budget is
scaled up from here instead of making every start-up wait for a full step."""


def measure(model: Model, device: Device, config: ResolvedConfig, *, rank: int, free_bytes: int) -> DeviceFacts:
    """Return the facts of a device that holds a loaded model.

    Args:
        model: with its weights.
        device: where it is.
        config: sizes of a step.
        rank: of this worker.
        free_bytes: free memory before the weights were loaded.

    Raises:
        NotEnoughMemoryError: a step of these sizes has no memory.
    """
    activation, graphs = _step_bytes(model, device, config)
    return DeviceFacts(
        rank=rank,
        device_name=device.name,
        total_bytes=device.total_bytes,
        free_bytes=free_bytes,
        weights_bytes=model.weights_bytes,
        activation_bytes=activation,
        graph_bytes=graphs,
        kv_block_bytes=kv_block_bytes(config, is_native=model.library is not None),
    )


def _step_bytes(model: Model, device: Device, config: ResolvedConfig) -> tuple[int, int]:
    """Return the bytes of activations and of graphs."""
    stream = device.stream()
    if stream is None:
        return activation_bytes(model, device, config), 0
    from octavo.worker_proc.pipeline.measure import measure_pipeline  # needs Triton

    try:
        measured = measure_pipeline(model, device, stream, config)
    except torch.OutOfMemoryError as error:
        raise NotEnoughMemoryError(
            f"a step does not fit in memory beside the weights: {error}",
            hint="use a smaller --max-num-batched-tokens, --max-num-seqs or --max-model-len",
        ) from error
    return measured.activation_bytes, measured.graph_bytes


def activation_bytes(model: Model, device: Device, config: ResolvedConfig) -> int:
    """Return the peak memory of a step above the weights.

    A native program plans its memory when it is made. With it count the logits' copies of the sampler.
    Otherwise two steps are measured, and one part is computed.

    The first step is a prefill chunk without a sample, scaled from `MEASURED_TOKENS` to the token budget;
    the second decodes `max_num_seqs` requests and samples for each. Both also warm the kernels up. They
    are short; what attention needs for a request of `max_model_len` tokens is computed. The measured part
    is never less than the logits of all samples and one copy of them: memory that was reused from an
    earlier peak cannot be seen from outside.
    """
    budget, num_seqs = config.max_num_batched_tokens, config.max_num_seqs
    logits_bytes = num_seqs * config.model.vocab_size * torch.float32.itemsize
    if model.library is not None:
        return program_bytes(model, config) + logits_bytes
    num_tokens = min(budget, MEASURED_TOKENS, config.max_model_len)
    prefill = _peak_growth(model, device, config, num_requests=1, num_tokens=num_tokens, samples=False)
    decode = _peak_growth(model, device, config, num_requests=num_seqs, num_tokens=1, samples=True)
    measured = max(prefill * -(-budget // num_tokens) + decode, 2 * logits_bytes)
    return measured + workspace_bytes(
        config.max_model_len, model.attention_shape, torch_dtype(config), device.torch_device
    )


def program_bytes(model: Model, config: ResolvedConfig) -> int:
    """Return the memory of the programs that steps run, at their largest.

    Raises:
        NotEnoughMemoryError: the system does not promise that much.
    """
    bounds = {"max_model_len": config.max_model_len, "max_logits": PROMPT_LOGPROBS_ROWS}
    try:
        forward = build_forward(model, config, num_blocks=1, **bounds)
    except MemoryError as error:
        raise NotEnoughMemoryError(
            f"the activations of a step do not fit in memory: {error}",
            hint="use a smaller --max-num-batched-tokens or --max-model-len",
        ) from error
    assert isinstance(forward, NativeForward), "the model was packed for native programs"
    return forward.num_bytes


def _peak_growth(
    model: Model, device: Device, config: ResolvedConfig, *, num_requests: int, num_tokens: int, samples: bool
) -> int:
    """Return how far memory rises in one step of equal requests; its cache, made before, does not count."""
    blocks_each = -(-num_tokens // config.block_size)
    executor = StepExecutor.build(model, config, num_blocks=num_requests * blocks_each, max_model_len=num_tokens)
    sampling = SamplingSpec(max_tokens=1, seed=0, temperature=1.0)
    admitted = [
        Admitted(
            slot=slot,
            request_id="",
            token_ids=[0] * num_tokens,
            num_prompt_tokens=num_tokens,
            block_ids=list(range(slot * blocks_each, (slot + 1) * blocks_each)),
            sampling=sampling,
        )
        for slot in range(num_requests)
    ]
    scheduled = [Scheduled(slot, 0, num_tokens, samples) for slot in range(num_requests)]
    device.reset_peak()
    executor.execute(StepPlan(sequence=0, released=[], admitted=admitted, appended=[], scheduled=scheduled))
    return device.peak_growth_bytes()
