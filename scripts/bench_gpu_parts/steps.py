"""Steps of a worker's model in process: what the worker itself computes them with, without a core or a frontend.

The cache is as full as the requests are long, with random numbers: it need not be computed to be read.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.overrides import TorchFunctionMode

from octavo.frontend.model_files.facts import read_model_facts
from octavo.kernels.native.library import NativeLibrary
from octavo.protocol.config import resolve
from octavo.protocol.config.engine import DeviceName
from octavo.protocol.config.sources import engine_config
from octavo.protocol.env import Env
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import Admitted, Scheduled, StepPlan
from octavo.worker_proc.device import open_device
from octavo.worker_proc.executor.open import open_executor
from octavo.worker_proc.weights.load import load_model

WARM_UP_STEPS = 4
LEAST_STEPS, MOST_STEPS = 8, 60
ENOUGH_S = 1.0
"""Of steps of one kind."""
PREFILLS = 3
MOST_FURTHER_TOKENS = WARM_UP_STEPS + 2 * MOST_STEPS
LEAST_FILLED_BYTES = 1 << 16


class StepRunner:
    """A model and a cache for `max_tokens` tokens of `max_batch` requests together."""

    def __init__(
        self,
        model: str,
        device: DeviceName,
        *,
        max_tokens: int,
        max_batch: int,
        library: NativeLibrary | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        user_config = engine_config(
            {
                "model": model,
                "device": device,
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "max_num_seqs": max_batch,
                **(settings or {}),
            }
        )
        facts = read_model_facts(user_config.model, Env.read())
        self._config = resolve(user_config, facts, device=device, num_cores=torch.get_num_threads())
        self._device = open_device(self._config)
        loaded = load_model(
            self._config, lambda share: None, device=self._device.torch_device, library=library, cache_dir=None
        )
        self._num_blocks = -(-max_tokens // self._config.block_size) + max_batch * self._blocks(MOST_FURTHER_TOKENS)
        with _FilledMemory(), torch.inference_mode():
            self._executor = open_executor(
                loaded,
                self._config,
                self._device.stream(),
                lambda result: None,
                num_blocks=[self._num_blocks],
                max_model_len=self._config.max_model_len,
            )
        self._sequence = 0

    def step(self, batch: int, context: int, num_tokens: int, *, asks_busy: bool = False) -> tuple[float, float | None]:
        """Return the seconds of one of several steps, and how long the GPU computed in it if that is asked.

        Each of `batch` requests computes `num_tokens`, up to position `context`: 1, in each step another one, or all.
        """
        if num_tokens > 1:
            return self._prefill_seconds(batch, context), None
        self._admit(batch, context)
        try:
            position = context - 1
            for _ in range(WARM_UP_STEPS):
                position = self._decode(batch, position)
            once_s = self._elapsed(lambda: self._decode(batch, position))
            num_steps = max(LEAST_STEPS, min(MOST_STEPS, round(ENOUGH_S / once_s)))
            first = position + 1
            step_s = self._elapsed(lambda: self._decode(batch, first, num_steps)) / num_steps
            busy_s = None
            if asks_busy:
                first += num_steps
                busy_s = self._busy_seconds(lambda: self._decode(batch, first, LEAST_STEPS)) / LEAST_STEPS
            return step_s, busy_s
        finally:
            self._run(released=list(range(batch)))

    def _prefill_seconds(self, batch: int, context: int) -> float:
        times = []
        for _ in range(1 + PREFILLS):
            scheduled = [Scheduled(slot, 0, context, 1) for slot in range(batch)]
            self._admit(batch, context)
            times.append(self._elapsed(lambda scheduled=scheduled: self._run(scheduled=scheduled)))  # type: ignore[misc]
            self._run(released=list(range(batch)))
        return min(times[1:])

    def _admit(self, batch: int, context: int) -> None:
        """Put requests into the batch whose tokens up to `context` are known, in blocks without an order."""
        rng = np.random.default_rng(0)
        blocks_each = self._blocks(min(context + MOST_FURTHER_TOKENS, self._config.max_model_len))
        blocks = rng.permutation(self._num_blocks)[: batch * blocks_each].reshape(batch, blocks_each)
        sampling = SamplingSpec(max_tokens=MOST_FURTHER_TOKENS, seed=0, temperature=0.6)
        tokens = rng.integers(0, self._config.model.vocab_size, (batch, context))
        self._run(
            admitted=[
                Admitted(
                    slot=slot,
                    request_id=f"{slot}",
                    token_ids=pack_ids(tokens[slot].tolist()),
                    num_prompt_tokens=context,
                    block_ids=[blocks[slot].tolist()],
                    params=sampling,
                )
                for slot in range(batch)
            ]
        )

    def _decode(self, batch: int, position: int, num_steps: int = 1) -> int:
        """Compute one token more of each request in every step; return the position after the last."""
        for start in range(position, position + num_steps):
            self._run(scheduled=[Scheduled(slot, start, 1, 1) for slot in range(batch)])
        return position + num_steps

    def _run(
        self,
        *,
        released: list[int] | None = None,
        admitted: list[Admitted] | None = None,
        scheduled: list[Scheduled] | None = None,
    ) -> None:
        plan = StepPlan(self._sequence, released or [], admitted or [], [], scheduled or [])
        self._executor.begin(plan, tuple)
        self._sequence += 1

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.block_size)

    def _elapsed(self, work: Callable[[], object]) -> float:
        self._synchronize()
        started = time.perf_counter()
        work()
        self._synchronize()
        return time.perf_counter() - started

    def _busy_seconds(self, work: Callable[[], object]) -> float:
        """Return how long kernels ran; on a CPU, which has none, 0."""
        with torch.profiler.profile() as profile:
            work()
            self._synchronize()
        microseconds = sum(
            event.self_device_time_total
            for event in profile.key_averages()
            if event.device_type != DeviceType.CPU and not event.is_user_annotation
        )
        return float(microseconds) / 1e6

    def _synchronize(self) -> None:
        self._executor.drain()
        if self._device.torch_device.type == "cuda":
            torch.cuda.synchronize()


class _FilledMemory(TorchFunctionMode):
    """Memory that would be left as it is holds random numbers: what a cache held by accident could be NaN."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        is_new = function is torch.empty and isinstance(result, Tensor)
        if is_new and result.is_floating_point() and result.nbytes >= LEAST_FILLED_BYTES:
            result.normal_()
        return result
