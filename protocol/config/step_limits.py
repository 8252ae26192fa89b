"""Limits on the size and duration of a step: defaults by device, and the user's settings."""

from typing import NamedTuple, TypeVar

from octavo.protocol.config.engine import DeviceName, EngineConfig
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.config.pooling import pooling_budget
from octavo.protocol.errors import ConfigError

T = TypeVar("T", int, float)

_DEFAULT_SEQS = 256
_DEFAULT_BUDGET = {"cpu": 512, "cuda": 8192}
_DEFAULT_FULL_STEP = {"cpu": 64, "cuda": 0}
"""In tokens per thread. With this many rows, matrix products run at the full speed of a core (docs/performance.md)."""
_POOLING_FULL_STEP = {"cpu": 1024, "cuda": 0}
"""The value for pooling models. It is larger because these are often so small that the time between two steps
matters."""
_DEFAULT_DECODE_INTERVAL = {"cpu": 512, "cuda": 0}
"""In tokens per thread: about 0.6 s of a small model's time, on any number of threads."""
_DEFAULT_STEP_TIME_TARGET = {"cpu": 0.15, "cuda": 0.0}
"""In seconds. Steps on a GPU are shorter anyway."""

_DEFAULT_SCHEDULER_STEPS = 8
"""On a CPU. More gains little: one plan for eight steps takes less than a hundredth of their time
(docs/performance.md)."""

_LARGEST_GRAPH = 512
"""Larger decodes take longer to compute than to launch, so a graph would not help."""


class StepLimits(NamedTuple):
    """The step limits in `ResolvedConfig`."""

    max_num_seqs: int
    max_num_batched_tokens: int
    full_step_tokens: int
    decode_interval_tokens: int
    step_time_target_s: float
    max_graph_size: int


def resolve_step_limits(
    config: EngineConfig, facts: ModelFacts, device: DeviceName, num_threads: int, max_model_len: int
) -> StepLimits:
    """Resolve the limits that the user left open.

    Args:
        config: the user's settings.
        facts: facts of the model.
        device: where the model runs.
        num_threads: compute threads of a pipeline stage.
        max_model_len: most tokens of a request.

    Raises:
        ConfigError: the token budget of a step is too small for the number of requests.
    """
    scheduler, is_pooled = config.scheduler, facts.pooling is not None
    max_num_seqs = scheduler.max_num_seqs or _DEFAULT_SEQS
    budget = scheduler.max_num_batched_tokens or max(_DEFAULT_BUDGET[device], max_num_seqs)
    budget = pooling_budget(config, facts, budget, max_model_len)
    if budget < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({budget}) is below max_num_seqs ({max_num_seqs}): "
            "not every running request could decode in one step",
            hint=f"use --max-num-batched-tokens {max_num_seqs} or --max-num-seqs {budget}",
        )
    full_step = (_POOLING_FULL_STEP if is_pooled else _DEFAULT_FULL_STEP)[device] * num_threads
    decode_interval = _DEFAULT_DECODE_INTERVAL[device] * num_threads
    time_target = 0.0 if is_pooled else _DEFAULT_STEP_TIME_TARGET[device]
    largest_graph = min(max_num_seqs, _or_default(config.device.max_cudagraph_capture_size, _LARGEST_GRAPH))
    return StepLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        full_step_tokens=_or_default(scheduler.full_step_tokens, full_step),
        decode_interval_tokens=_or_default(scheduler.decode_interval_tokens, decode_interval),
        step_time_target_s=_or_default(scheduler.step_time_target, time_target),
        max_graph_size=0 if config.device.enforce_eager else largest_graph,
    )


def resolve_scheduler_steps(config: EngineConfig, device: DeviceName, *, has_drafts: bool, is_pooled: bool) -> int:
    """Return how many decode steps one plan may have.

    Args:
        config: the user's settings.
        device: where the model runs.
        has_drafts: whether steps verify drafts.
        is_pooled: whether the model generates no tokens.

    Raises:
        ConfigError: the user has requested several, but this engine computes one at a time.
    """
    requested, parallel = config.scheduler.num_scheduler_steps, config.parallel
    reasons = {
        f"on {device}": device != "cpu",
        "with several pipeline stages": parallel.pipeline_parallel_size > 1,
        "with experts over several engines": parallel.is_lock_step,
        "with --speculative-config, which has steps of several tokens": has_drafts,
        "with logits processors": bool(config.model.logits_processors or config.processor_code),
        "with a pooling model": is_pooled,
    }
    reason = next((reason for reason, is_given in reasons.items() if is_given), None)
    if reason is None:
        return requested or _DEFAULT_SCHEDULER_STEPS
    if (requested or 1) > 1:
        raise ConfigError(
            f"num_scheduler_steps ({requested}): {reason} each decode step has a plan of its own",
            hint="leave out --num-scheduler-steps",
        )
    return 1


def _or_default(requested: T | None, default: T) -> T:
    return default if requested is None else requested
