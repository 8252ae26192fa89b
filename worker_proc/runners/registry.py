"""Finds the runner for a model. Importing this module imports no runner."""

from importlib import import_module
from typing import Protocol

from octavo.protocol.config import ResolvedConfig
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.device.base import Device
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.executor.runner import Runner
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.runners.host import HostRunner
from octavo.worker_proc.runners.memory import StepMemory
from octavo.worker_proc.runners.rounds import DraftRounds, HostRounds


class RunnerModule(Protocol):
    """Interface of a runner's package."""

    def open_runner(
        self,
        model: Model,
        config: ResolvedConfig,
        stream: Stream | None,
        *,
        num_blocks: int,
        max_model_len: int,
        num_states: int = 0,
    ) -> Runner:
        """Make the cache, and a runner over it.

        Raises:
            MemoryError, RuntimeError: not enough memory for the cache.
        """

    def measure(self, model: Model, device: Device, config: ResolvedConfig) -> StepMemory:
        """Return the memory of the largest steps. Leaves nothing behind.

        Raises:
            NotEnoughMemoryError: a step of these sizes does not fit.
        """


def open_runner(
    model: Model,
    config: ResolvedConfig,
    stream: Stream | None,
    *,
    num_blocks: int,
    max_model_len: int,
    num_states: int = 0,
) -> Runner:
    """Make the cache of a loaded model, and the runner that computes with both.

    Args:
        model: model with its weights; shared, not copied.
        config: sizes of a step and of a block, types, threads.
        stream: stream of the device; `None` if the host computes.
        num_blocks: number of blocks of the cache.
        max_model_len: longest request, in tokens.
        num_states: number of slots for recurrent states.

    Raises:
        MemoryError, RuntimeError: not enough memory for the cache.
    """
    module = _module(model, stream)
    return module.open_runner(
        model, config, stream, num_blocks=num_blocks, max_model_len=max_model_len, num_states=num_states
    )


def open_rounds(
    model: Model,
    config: ResolvedConfig,
    runner: Runner,
    stream: Stream | None,
    batch: BatchState,
    *,
    group: int,
    num_blocks: int,
    max_model_len: int,
) -> DraftRounds:
    """Make the draft rounds of a draft model or head, with its own cache that uses the target model's block ids.

    Args:
        model: the draft model or head.
        config: sizes of a step and of a block, types, threads.
        runner: runner of the target model.
        stream: stream of the device; `None` if the host computes.
        batch: batch of the runner.
        group: cache group of the target model whose block ids are used.
        num_blocks: number of blocks of the cache.
        max_model_len: tokens that the draft model can attend to.

    Raises:
        MemoryError, RuntimeError: not enough memory for the cache.
    """
    if stream is None:
        own = open_runner(model, config, None, num_blocks=num_blocks, max_model_len=max_model_len)
        assert isinstance(own, HostRunner) and isinstance(runner, HostRunner), "the host computes both"
        return HostRounds(model, own.forward, runner, group, batch, config.model.vocab_size)
    module = import_module("octavo.worker_proc.runners.cuda_graphs.open")
    rounds: DraftRounds = module.open_rounds(
        model, config, runner, batch, group=group, num_blocks=num_blocks, max_model_len=max_model_len
    )
    return rounds


def measure_steps(model: Model, device: Device, config: ResolvedConfig) -> StepMemory:
    """Return the memory of the largest steps.

    Raises:
        NotEnoughMemoryError: a step of these sizes does not fit.
    """
    return _module(model, device.stream()).measure(model, device, config)


def check_batch_invariance(model: Model, config: ResolvedConfig) -> str:
    """Return the first module of a `transformers` model whose rows have other bits in other batches; "" if there is
    none.

    Raises:
        ConfigError: the model mixes the rows of requests.
    """
    module = import_module("octavo.worker_proc.runners.torch.batch_invariance")
    found: str = module.check_batch_invariance(model, config)
    return found


def _module(model: Model, stream: Stream | None) -> RunnerModule:
    is_native = model.library is not None and model.is_recordable
    name = "cuda_graphs" if stream is not None else "native" if is_native else "torch"
    module: RunnerModule = import_module(f"octavo.worker_proc.runners.{name}.open")
    return module
