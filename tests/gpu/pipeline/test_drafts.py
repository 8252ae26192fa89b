"""Steps that verify drafts on a device: the tokens and bits of one token at a time, beside steps in flight."""

import msgspec
import pytest
from fake_device import MeasuredDevice
from fake_stream import FakeStream
from gpu_steps import SPECS, assert_equal, driver, new_stream, prompt
from tiny_models import VOCAB_SIZE
from worker_plans import Running, spec

from octavo.kernels.token_mask import pack_mask
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.config.speculation import ResolvedSpeculation
from octavo.protocol.steps import TokenMask
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.runners.cuda_graphs import open as opening
from octavo.worker_proc.runners.cuda_graphs.runner import CudaGraphRunner

pytestmark = [
    # What a step is filled up with reads cache that nobody has written, which holds NaN here.
    pytest.mark.filterwarnings("ignore:All-NaN"),
    # In one process: all of them use the same kernels, and would compile them at the same time.
    pytest.mark.xdist_group("pipeline"),
]

NUM_TOKENS = 5


@pytest.fixture(scope="module")
def speculating(config: ResolvedConfig) -> ResolvedConfig:
    return msgspec.structs.replace(config, speculation=ResolvedSpeculation(method="ngram", max_depth=3))


def one_by_one(model: Model, config: ResolvedConfig, names: list[str], stream: Stream) -> list[Running]:
    core = driver(model, config, stream)
    requests = [core.admit(slot, prompt(5, slot), SPECS[name]) for slot, name in enumerate(names)]
    core.run(NUM_TOKENS)
    core.executor.close()
    return requests


@pytest.mark.parametrize(
    ("names", "max_logits"),
    [
        (["greedy", "filtered", "processed"], 16),
        (["greedy", "filtered"], 3),
        (["penalized", "bad words", "named", "allowed"], 16),
    ],
)
def test_drafts_change_no_bit(
    names: list[str], max_logits: int, model: Model, config: ResolvedConfig, speculating: ResolvedConfig, stream: Stream
) -> None:
    expected = one_by_one(model, config, names, new_stream(stream.torch_device))
    core = driver(model, speculating, stream)
    assert core.executor.runner.max_logits == 16
    core.executor.runner.max_logits = max_logits
    requests = [core.admit(slot, prompt(5, slot), SPECS[name]) for slot, name in enumerate(names)]
    core.run(1)
    last = len(names) - 1  # has no drafts, and goes on meanwhile
    draft_tokens = {slot: expected[slot].outputs[1:4] for slot in range(last)}
    draft_tokens[0][1] = (draft_tokens[0][1] + 1) % VOCAB_SIZE
    num_replays = stream.num_replays if isinstance(stream, FakeStream) else 0
    core.begin(draft_tokens=draft_tokens)
    if isinstance(stream, FakeStream):
        has_rounds = "penalized" in names or max_logits < 16
        assert stream.num_replays == num_replays + 2 - has_rounds, "a step with drafts is a graph"
    core.begin({last: 1})
    core.executor.drain()
    assert [len(request.outputs) for request in requests] == [3, *[5] * (last - 1), 3]
    core.run(2)
    core.executor.close()
    for request, wanted in zip(requests, expected, strict=True):
        assert request.outputs[:NUM_TOKENS] == wanted.outputs
        assert request.logprobs[:NUM_TOKENS] == wanted.logprobs


def test_each_draw_has_its_own_mask(
    model: Model, config: ResolvedConfig, speculating: ResolvedConfig, stream: Stream
) -> None:
    chosen = [[11 + index, 50 + index, 90 + index] for index in range(NUM_TOKENS)]
    words = [pack_mask(token_ids, VOCAB_SIZE).numpy().tobytes() for token_ids in chosen]

    def masks(first: int, num_draws: int) -> list[TokenMask]:
        return [(0, index, words[first + index]) for index in range(num_draws)]

    sampling = spec(temperature=1.0, seed=5, frequency_penalty=0.5)
    plain = driver(model, config, new_stream(stream.torch_device))
    expected = plain.admit(0, prompt(5), sampling)
    for index in range(NUM_TOKENS):
        plain.begin(masks=lambda index=index: masks(index, 1))
    plain.executor.drain()
    plain.executor.close()
    core = driver(model, speculating, stream)
    request = core.admit(0, prompt(5), sampling)
    core.begin(masks=lambda: masks(0, 1))
    core.executor.drain()
    core.begin(masks=lambda: masks(1, 4), draft_tokens={0: expected.outputs[1:4]})
    core.executor.drain()
    core.executor.close()
    assert request.outputs == expected.outputs
    assert_equal(request, expected)


def test_memory_is_measured_with_as_many_samples_as_a_step_can_have(
    model: Model, speculating: ResolvedConfig, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = []
    original = CudaGraphRunner.sample

    def sample(self, samples, **rest):
        run.append(len(samples))
        return original(self, samples, **rest)

    monkeypatch.setattr(CudaGraphRunner, "sample", sample)
    monkeypatch.setattr(opening, "_graph_bytes", lambda *arguments: 0)
    opening.measure(model, MeasuredDevice(stream), speculating)
    assert run[1:] == [4, 16], "a decode of all requests; then with drafts"
