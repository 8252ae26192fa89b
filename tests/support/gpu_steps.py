"""Shared by the tests of steps on a GPU: requests, settings, and a core that drives an executor."""

import random
from collections import deque
from collections.abc import Mapping

import pytest
import torch
from fake_stream import FakeStream
from pipeline_driver import PipelineDriver
from tiny_models import VOCAB_SIZE
from triton_interpreter import IS_INTERPRETING
from worker_plans import NUM_BLOCKS, Running, spec

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import StepPlan, StepResult
from octavo.worker_proc.device.cuda_stream import CudaStream
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.executor.executor import PipelinedExecutor
from octavo.worker_proc.executor.open import open_executor
from octavo.worker_proc.executor.runner import ReceiveMasks
from octavo.worker_proc.lora.loader import AdapterLoader
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.sampling.processors import Processors

NUM_STEPS = 3
SETTINGS = {"max_num_seqs": 4, "max_model_len": 64, "block_size": 4, "max_num_batched_tokens": 24}

SPECS: Mapping[str, SamplingSpec] = {
    "greedy": spec(logprobs=3),
    "filtered": spec(temperature=0.7, seed=2**64 - 1, top_k=20, top_p=0.9, min_p=0.01, logprobs=2),
    "penalized": spec(
        temperature=0.9, seed=3, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.2, logprobs=2
    ),
    "named": spec(temperature=1.0, seed=10, logprobs=0, logprob_token_ids=(9, 300, 11)),
    "biased": spec(
        temperature=1.0,
        seed=5,
        logit_bias=((17, 8.0), (18, -100.0)),
        prompt_logprobs=2,
        prompt_logprob_token_ids=((9,), (), (3, 300)),
        prompt_logprob_start=1,
    ),
    "bad words": spec(
        temperature=1.0, seed=6, bad_words=((7,), (9, 10), (20, 21, 22)), min_tokens=3, eos_token_ids=(4,)
    ),
    "processed": spec(temperature=0.8, seed=4, top_k=9, logprobs=3, logprobs_mode="processed_logprobs"),
    "allowed": spec(
        temperature=1.0, seed=8, allowed_token_ids=tuple(range(5, 60)), logprobs=1, logprobs_mode="raw_logits"
    ),
}


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


def new_stream(device: torch.device) -> Stream:
    if IS_INTERPRETING:
        return FakeStream()
    return CudaStream(device)


def driver(
    model: Model,
    config: ResolvedConfig,
    stream: Stream | None,
    processors: Processors | None = None,
    *,
    has_graphs: bool = True,
    adapters: AdapterLoader | None = None,
) -> PipelineDriver:
    num_groups = len(model.cache_groups)
    with torch.inference_mode():
        core = PipelineDriver(
            lambda deliver: open_executor(
                model,
                config,
                stream,
                deliver,
                num_blocks=NUM_BLOCKS * max(1, num_groups),
                max_model_len=config.max_model_len,
                num_states=NUM_BLOCKS,
                processors=processors,
                adapters=adapters,
            ),
            num_blocks=NUM_BLOCKS,
            block_size=config.block_size,
            num_groups=num_groups,
            has_states=model.state_group is not None,
        )
        if has_graphs and stream is not None:
            _capture_graphs(core.executor)
    return core


class DeviceExecutor:
    """Starts each plan when it is made, in CUDA graphs where possible."""

    def __init__(self, model: Model, config: ResolvedConfig, stream: Stream) -> None:
        self._results: deque[StepResult] = deque()
        with torch.inference_mode():
            self.pipelined = open_executor(
                model,
                config,
                stream,
                self._results.append,
                num_blocks=NUM_BLOCKS,
                num_states=NUM_BLOCKS,
                max_model_len=config.max_model_len,
            )
            _capture_graphs(self.pipelined)

    def begin(self, plan: StepPlan, receive_masks: ReceiveMasks) -> None:
        """Make the device compute a plan after the earlier ones."""
        self.pipelined.begin(plan, receive_masks)

    def take_result(self) -> StepResult:
        """Return the result of the oldest plan."""
        if not self._results:
            self.pipelined.drain()
        return self._results.popleft()


def _capture_graphs(executor: PipelinedExecutor) -> None:
    executor.runner.graphs.capture_all()
    if (drafter := executor.drafter) is not None:
        drafter.rounds.forward.graphs.capture_all()


def assert_equal(request: Running, expected: Running) -> None:
    """Check that tokens are equal, and logprobs are equal up to rounding."""
    assert request.outputs[: len(expected.outputs)] == expected.outputs
    for found, wanted in zip(
        request.logprobs + request.prompt_logprobs, expected.logprobs + expected.prompt_logprobs, strict=True
    ):
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            assert found.token_ids == wanted.token_ids
            assert found.rank == wanted.rank
            assert found.logprobs == pytest.approx(wanted.logprobs, abs=2e-4)
