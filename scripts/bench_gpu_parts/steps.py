"""Steps of a worker's executor in this process, without a core or a frontend.

The cache is filled with random numbers as far as the requests reach; the prompts are not computed.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.overrides import TorchFunctionMode

from bench_gpu_parts.machine import MIXED_CHUNKS, Sampling
from octavo.frontend.model_files.facts import read_head_facts, read_model_facts
from octavo.kernels.native.library import NativeLibrary
from octavo.protocol.config import ResolvedConfig, resolve
from octavo.protocol.config.engine import DeviceName
from octavo.protocol.config.sources import engine_config
from octavo.protocol.env import Env
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import Admitted, Scheduled, StepPlan, StepResult
from octavo.worker_proc.device import open_device
from octavo.worker_proc.executor.open import open_executor
from octavo.worker_proc.runners.cuda_graphs.rounds import DeviceRounds
from octavo.worker_proc.runners.cuda_graphs.runner import CudaGraphRunner
from octavo.worker_proc.weights.load import load_model

WARM_UP_STEPS = 4
LEAST_STEPS, MOST_STEPS = 8, 60
ENOUGH_S = 1.0
"""Seconds to spend on steps of one kind."""
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
        head = read_head_facts(user_config, facts, Env.read())
        self._config = resolve(user_config, facts, device=device, num_cores=torch.get_num_threads(), head=head)
        self.results: list[StepResult] = []
        """Results of all steps since the list was last cleared."""
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
                self.results.append,
                num_blocks=self._num_blocks,
                max_model_len=self._config.max_model_len,
            )
            self._executor.warm_up()
        self._sequence = 0

    @property
    def config(self) -> ResolvedConfig:
        """The worker's configuration."""
        return self._config

    def step(
        self, batch: int, context: int, num_tokens: int, *, asks_busy: bool = False, sampling: Sampling | None = None
    ) -> tuple[float, float | None]:
        """Return the seconds of one of several steps, and the GPU's busy time in it if requested.

        Each of `batch` requests computes `num_tokens` tokens, up to position `context`: one token, the next
        one in each step, or all of them. `sampling` has fields of `SamplingSpec` that differ from a temperature of 0.6.
        """
        if num_tokens > 1:
            return self._prefill_seconds(batch, context), None
        with self._decoding(batch, context, sampling or {}) as (first, once_s):
            num_steps = max(LEAST_STEPS, min(MOST_STEPS, round(ENOUGH_S / once_s)))
            step_s = self._elapsed(lambda: self._decode(batch, first, num_steps)) / num_steps
            busy_s = None
            if asks_busy:
                kernels = self._kernels_of(lambda: self._decode(batch, first + num_steps, LEAST_STEPS))
                busy_s = sum(spent_s for _, spent_s, _ in kernels) / LEAST_STEPS
            return step_s, busy_s

    def profile(
        self, batch: int, context: int, sampling: Sampling | None = None
    ) -> tuple[float, list[tuple[str, float, float]]]:
        """Return the seconds of a decode step, and its kernels: name, seconds and launches per step, longest first."""
        with self._decoding(batch, context, sampling or {}) as (first, _):
            step_s = self._elapsed(lambda: self._decode(batch, first, 2 * LEAST_STEPS)) / (2 * LEAST_STEPS)
            kernels = self._kernels_of(lambda: self._decode(batch, first + 2 * LEAST_STEPS, LEAST_STEPS))
            per_step = [(name, spent_s / LEAST_STEPS, count / LEAST_STEPS) for name, spent_s, count in kernels]
            return step_s, sorted(per_step, key=lambda kernel: -kernel[1])

    def mixed_step(
        self, batch: int, context: int, chunk: int, *, asks_busy: bool = False
    ) -> tuple[float, float | None]:
        """Return the seconds of a step in which `batch` requests decode and another computes `chunk` prompt tokens.

        The runner must have been opened for at least `batch` + 1 requests.
        """
        with self._decoding(batch, context, {}) as (first, _):
            prompt_len = chunk * MIXED_CHUNKS
            self._admit([batch], prompt_len, {}, first_block=batch * self._blocks_each(context))
            done = 0

            def steps(num_steps: int) -> None:
                nonlocal done
                for _ in range(num_steps):
                    decodes = [Scheduled(slot, first + done, 1, 1) for slot in range(batch)]
                    self.run(scheduled=[*decodes, Scheduled(batch, done * chunk, chunk, 0)])
                    done += 1

            steps(1)
            step_s = self._elapsed(lambda: steps(LEAST_STEPS - 1)) / (LEAST_STEPS - 1)
            busy_s = None
            if asks_busy:
                busy_s = sum(spent_s for _, spent_s, _ in self._kernels_of(lambda: steps(LEAST_STEPS))) / LEAST_STEPS
            self.run(released=[batch])
            return step_s, busy_s

    def drafting_step(self, batch: int, context: int, num_drafts: int, *, waits_each_time: bool = False) -> float:
        """Return the seconds of a decode step and its drafts, for a model with a drafter.

        `waits_each_time`: whether the host waits for each draft rather than only for the last one.
        """
        assert self._executor.drafter is not None, "speculative_config"
        rounds = self._executor.drafter.rounds
        with self._decoding(batch, context, {}) as (first, _):
            if isinstance(rounds, DeviceRounds):
                rounds.waits_each_time = waits_each_time
            position = self._decode(batch, first, WARM_UP_STEPS, num_drafts)
            return self._elapsed(lambda: self._decode(batch, position, LEAST_STEPS, num_drafts)) / LEAST_STEPS

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Launch kernels one by one while the context lasts; on a CPU there are no graphs anyway."""
        runner = self._executor.runner
        if isinstance(runner, CudaGraphRunner):
            runner.graphs.is_eager = True
        try:
            yield
        finally:
            if isinstance(runner, CudaGraphRunner):
                runner.graphs.is_eager = False

    def run(
        self,
        *,
        released: list[int] | None = None,
        admitted: list[Admitted] | None = None,
        scheduled: list[Scheduled] | None = None,
        num_drafts: int = 0,
    ) -> None:
        """Begin one step; its result arrives later."""
        plan = StepPlan(self._sequence, released or [], admitted or [], [], scheduled or [], num_drafts=num_drafts)
        self._executor.begin(plan, tuple)
        self._sequence += 1

    def synchronize(self) -> None:
        """Wait for all steps and their results."""
        self._executor.drain()
        if self._device.torch_device.type == "cuda":
            torch.cuda.synchronize()

    @contextmanager
    def _decoding(self, batch: int, context: int, sampling: Sampling) -> Iterator[tuple[int, float]]:
        """Yield the next position of decoding requests, and the seconds of one step; remove the requests on exit."""
        self._admit(range(batch), context, sampling)
        try:
            position = context - 1
            for _ in range(WARM_UP_STEPS):
                position = self._decode(batch, position)
            once_s = self._elapsed(lambda: self._decode(batch, position))
            yield position + 1, once_s
        finally:
            self.run(released=list(range(batch)))
            self.synchronize()
            self.results.clear()

    def _prefill_seconds(self, batch: int, context: int) -> float:
        times = []
        for _ in range(1 + PREFILLS):
            scheduled = [Scheduled(slot, 0, context, 1) for slot in range(batch)]
            self._admit(range(batch), context, {})
            times.append(self._elapsed(partial(self.run, scheduled=scheduled)))
            self.run(released=list(range(batch)))
        return min(times[1:])

    def _admit(self, slots: Sequence[int], context: int, sampling: Sampling, first_block: int = 0) -> None:
        """Admit requests whose tokens up to `context` are computed, in randomly ordered blocks."""
        rng = np.random.default_rng(0)
        blocks_each = self._blocks_each(context)
        assert first_block + len(slots) * blocks_each <= self._num_blocks, "the cache is too small"
        blocks = first_block + rng.permutation(len(slots) * blocks_each)
        spec = SamplingSpec(**{"max_tokens": MOST_FURTHER_TOKENS, "seed": 0, "temperature": 0.6, **sampling})
        tokens = rng.integers(0, self._config.model.vocab_size, (len(slots), context))
        self.run(
            admitted=[
                Admitted(
                    slot=slot,
                    request_id=f"{slot}",
                    token_ids=pack_ids(token_ids.tolist()),
                    num_prompt_tokens=context,
                    block_ids=[block_ids.tolist()],
                    params=spec,
                )
                for slot, token_ids, block_ids in zip(
                    slots, tokens, blocks.reshape(len(slots), blocks_each), strict=True
                )
            ]
        )

    def _decode(self, batch: int, position: int, num_steps: int = 1, num_drafts: int = 0) -> int:
        """Compute one more token of each request in every step; return the position after the last."""
        for start in range(position, position + num_steps):
            self.run(scheduled=[Scheduled(slot, start, 1, 1) for slot in range(batch)], num_drafts=num_drafts)
        return position + num_steps

    def _blocks_each(self, context: int) -> int:
        return self._blocks(min(context + MOST_FURTHER_TOKENS, self._config.max_model_len))

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.block_size)

    def _elapsed(self, work: Callable[[], object]) -> float:
        self.synchronize()
        started = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - started

    def _kernels_of(self, work: Callable[[], object]) -> list[tuple[str, float, int]]:
        """Return the kernels that ran: name, seconds and launches. On a CPU: torch's operations."""
        with torch.profiler.profile() as profile:
            work()
            self.synchronize()
        if self._device.torch_device.type != "cuda":
            return [(event.key, event.self_cpu_time_total / 1e6, event.count) for event in profile.key_averages()]
        return [
            (event.key, event.self_device_time_total / 1e6, event.count)
            for event in profile.key_averages()
            if event.device_type != DeviceType.CPU and not event.is_user_annotation
        ]


class _FilledMemory(TorchFunctionMode):
    """Fills memory that torch would leave uninitialized with random numbers, because old content could be NaN."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        is_new = function is torch.empty and isinstance(result, Tensor)
        if is_new and result.is_floating_point() and result.nbytes >= LEAST_FILLED_BYTES:
            result.normal_()
        return result
