"""Steps on a device, two in flight, through graphs: the tokens of the CPU, and the same bits in any company.

On a GPU with its own stream. In the interpreter with a stream that records graphs and finds what a real one would do
wrong without a word (tests/support/fake_stream.py), and with products that are torch's, row by row.
"""

import pytest
import torch
from gpu_steps import NUM_STEPS, SPECS, assert_equal, driver, prompt
from worker_plans import Running, spec

from octavo.kernels.token_mask import pack_mask
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.steps import NO_TOKEN, TokenMask
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.models.base import Model

pytestmark = [
    # What a step is filled up with reads cache that nobody has written, which holds NaN here.
    pytest.mark.filterwarnings("ignore:All-NaN"),
    # In one process: all of them use the same kernels, and would compile them at the same time.
    pytest.mark.xdist_group("pipeline"),
]


def test_the_tokens_of_the_cpu(
    model: Model, config: ResolvedConfig, stream: Stream, expected: dict[str, Running]
) -> None:
    names = list(SPECS)
    for some in (names[:4], names[4:]):
        core = driver(model, config, stream)
        requests = {name: core.admit(slot, prompt(5), SPECS[name]) for slot, name in enumerate(some)}
        core.run(NUM_STEPS)
        for name, request in requests.items():
            assert_equal(request, expected[name])
        core.executor.close()


def test_the_same_bits_in_chunks_in_company_and_through_graphs(
    model: Model, config: ResolvedConfig, stream: Stream
) -> None:
    sampling = spec(temperature=1.0, seed=7, logprobs=1)
    eager = driver(model, config, stream, has_graphs=False)
    alone_request = eager.admit(0, prompt(11, seed=1), sampling)
    eager.run(NUM_STEPS)
    eager.executor.close()
    core = driver(model, config, stream)
    core.admit(1, prompt(5), SPECS["named"])  # its steps compute logprobs after the draw
    request = core.admit(3, prompt(11, seed=1), sampling)
    core.begin({1: 5, 3: 4})
    core.begin({1: 1, 3: 7})
    core.run(NUM_STEPS - 1)
    core.executor.close()
    assert request.outputs == alone_request.outputs
    assert request.logprobs == alone_request.logprobs


def test_a_request_that_leaves_in_flight_goes_on_as_if_nothing_had_happened(
    model: Model, config: ResolvedConfig, stream: Stream, expected: dict[str, Running]
) -> None:
    """Its slot and its blocks are another's before what was in flight for it has come back."""
    core = driver(model, config, stream)
    core.admit(0, prompt(5), SPECS["penalized"])
    core.begin()
    core.executor.drain()
    core.begin()
    before = core.release(0)
    delivered = list(before.outputs)
    core.admit(0, prompt(7), SPECS["greedy"])
    core.begin()
    core.begin()
    core.release(0)
    again = core.admit(2, prompt(5), SPECS["penalized"], outputs=delivered)
    core.run(NUM_STEPS - 1)
    core.executor.close()
    assert again.outputs == expected["penalized"].outputs


def test_masks_bind_one_draw_and_are_waited_for_after_the_results_before(
    model: Model, config: ResolvedConfig, stream: Stream
) -> None:
    core = driver(model, config, stream)
    free, bound = core.admit(0, prompt(5), spec()), core.admit(1, prompt(5), spec())
    core.begin()
    words = pack_mask([9], config.model.vocab_size).numpy().tobytes()

    def receive_masks() -> list[TokenMask]:
        assert len(bound.outputs) == 1, "masks are made of the tokens before"
        return [(1, 0, words)]

    core.begin(masks=receive_masks)
    core.run(1)
    core.executor.close()
    assert bound.outputs[0] == free.outputs[0]
    assert bound.outputs[1] == 9
    assert bound.outputs[2] != 9


def test_a_request_whose_logits_are_no_numbers_fails_alone(
    model: Model, config: ResolvedConfig, stream: Stream, expected: dict[str, Running]
) -> None:
    core = driver(model, config, stream)
    fine, poisoned = core.admit(0, prompt(5), SPECS["penalized"]), core.admit(1, [5], spec(logprobs=1))
    embedding_VD = next(tensor for name, tensor in model.parameters.tensors.items() if "embed" in name)
    row_D = embedding_VD[5].clone()
    try:
        with torch.inference_mode():
            embedding_VD[5] = torch.nan
        core.begin()
        core.executor.drain()
    finally:
        with torch.inference_mode():
            embedding_VD[5] = row_D
    core.run(1)  # of the failed one too: its next step was planned already
    core.executor.close()
    assert core.results[0].token_ids.tolist() == [expected["penalized"].outputs[0], NO_TOKEN]
    assert core.results[0].logprobs[1] is None
    assert fine.outputs == expected["penalized"].outputs[:2]
    assert poisoned.outputs[0] == 0
