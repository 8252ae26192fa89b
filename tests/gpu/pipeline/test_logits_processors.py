"""Logits processors of an application, in steps on a GPU."""

from pathlib import Path

import pytest
import torch
from gpu_steps import SETTINGS, assert_equal, driver, new_stream, prompt
from tiny_models import VOCAB_SIZE
from worker_plans import Running, loaded, spec, worker_config

from octavo import BatchUpdate, LogitsProcessor
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.steps import NO_TOKEN, StepFault
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.sampling.processors import ProcessorFactory, Processors

pytestmark = [
    # What a step is filled up with reads cache that nobody has written, which holds NaN here.
    pytest.mark.filterwarnings("ignore:All-NaN"),
    # In one process: all of them use the same kernels, and would compile them at the same time.
    pytest.mark.xdist_group("pipeline"),
]


class Follow(LogitsProcessor):
    """Favours the token after the last one, twice as much after every output; fails where it is told to."""

    def __init__(self, config: object, device: object, is_pin_memory: bool) -> None:
        self.outputs: dict[int, tuple[dict[str, int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            assert not batch_update.removed and not batch_update.moved
            self.outputs.update({index: (p.extra_args or {}, out) for index, p, _, out in batch_update.added})

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, (arguments, output) in self.outputs.items():
            if len(output) == arguments.get("fails_at"):
                raise ValueError("as it was told")
            if output and arguments:
                logits[index, output[-1] + 1] += 2.0 ** len(output)
        return logits


FOLLOWED = [
    spec(extra_args={"follow": 1}, logprobs=2, logprobs_mode="processed_logprobs"),
    spec(temperature=0.8, seed=3, extra_args={"fails_at": 2}),
    spec(temperature=0.8, seed=4, frequency_penalty=0.5, extra_args={"follow": 1}, logprobs=1),
]


def followed(model: Model, config: ResolvedConfig, stream: Stream | None) -> tuple[list[Running], list[StepFault]]:
    """Run requests with a logits processor; returns them, and which of them failed."""
    factory = ProcessorFactory("follow", lambda: Follow(None, None, False), Follow.validate_params)
    core = driver(model, config, stream, Processors([factory]))
    requests = [core.admit(slot, prompt(4 + slot), sampling) for slot, sampling in enumerate(FOLLOWED)]
    core.run(5)
    core.executor.close()
    assert [result.token_ids[1] for result in core.results[2:]] == [NO_TOKEN] * 3
    return requests, [fault for result in core.results for fault in result.faults]


def assert_drafts_change_nothing(
    model: Model, config: ResolvedConfig, stream: Stream | None, expected: list[Running]
) -> None:
    """Run the same requests with drafts: processors see each token that is right, and none that is wrong."""
    factory = ProcessorFactory("follow", lambda: Follow(None, None, False), Follow.validate_params)
    core = driver(model, config, stream, Processors([factory]))
    requests = [core.admit(slot, prompt(4 + slot), sampling) for slot, sampling in enumerate(FOLLOWED)]
    core.run(1)
    wrong = (expected[0].outputs[2] + 1) % VOCAB_SIZE
    core.begin(draft_tokens={0: [expected[0].outputs[1], wrong, 5], 2: expected[2].outputs[1:4]})
    core.executor.drain()
    assert [len(request.outputs) for request in requests] == [3, 2, 5]
    core.run(2)
    core.executor.close()
    for place in (0, 2):
        assert requests[place].outputs[:5] == expected[place].outputs
        assert requests[place].logprobs[:5] == expected[place].logprobs
    faults = [fault for result in core.results for fault in result.faults]
    assert faults == [StepFault(1, "a logits processor raised ValueError: as it was told")]


@pytest.fixture(scope="module")
def computed_on_cpu(directory: Path) -> tuple[list[Running], list[StepFault]]:
    on_cpu = worker_config(directory, **SETTINGS)
    model = loaded(on_cpu)
    found = followed(model, on_cpu, None)
    assert_drafts_change_nothing(model, on_cpu, None, found[0])
    return found


def test_logits_processors_see_the_tokens_before_and_the_tokens_are_those_of_the_cpu(
    model: Model, config: ResolvedConfig, stream: Stream, computed_on_cpu: tuple[list[Running], list[StepFault]]
) -> None:
    found, faults = followed(model, config, stream)
    for request, wanted in zip(found[::2], computed_on_cpu[0][::2], strict=True):
        assert_equal(request, wanted)
    assert found[0].outputs[4] == found[0].outputs[3] + 1, "the processor knew every token"
    assert faults == computed_on_cpu[1] == [StepFault(1, "a logits processor raised ValueError: as it was told")]
    assert_drafts_change_nothing(model, config, new_stream(stream.torch_device), found)
