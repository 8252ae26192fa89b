"""Heads and models that draft on a device: the drafts of a CPU, and the tokens and bits of steps without drafts."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from fake_device import MeasuredDevice
from fake_stream import FakeStream
from gpu_steps import NUM_BLOCKS, SETTINGS, DeviceExecutor, driver, new_stream, prompt
from pipeline_driver import PipelineDriver
from small_engine import Result, SmallEngine, TimedRequest
from tiny_heads import make_head, make_mtp
from tiny_models import VOCAB_SIZE, make_tiny
from worker_plans import loaded, spec, worker_config

from octavo.kernels.token_mask import pack_mask
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.params import SamplingSpec
from octavo.protocol.stats import EngineStats
from octavo.protocol.steps import UNREAD_DRAFT
from octavo.worker_proc.batch.inputs import StepInputs
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.runners.cuda_graphs import open as opening
from octavo.worker_proc.runners.cuda_graphs.forward import GraphForward
from octavo.worker_proc.runners.cuda_graphs.graphs import StepGraphs
from octavo.worker_proc.runners.cuda_graphs.sizes import GraphKind
from octavo.worker_proc.weights.load import load_model

pytestmark = [
    # What a step is filled up with reads cache that nobody has written, which holds NaN here.
    pytest.mark.filterwarnings("ignore:All-NaN"),
    # In one process: all of them use the same kernels, and would compile them at the same time.
    pytest.mark.xdist_group("pipeline"),
]

METHODS = ("eagle", "eagle3", "draft_model")
NUM_DRAFTS = 3
SAMPLING = [spec(logprobs=2), spec(temperature=0.8, seed=5, top_k=20, logprobs=1)]
PENALIZED = [SAMPLING[0], msgspec.structs.replace(SAMPLING[1], frequency_penalty=0.4)]
"""The draws of steps with drafts are made in rounds."""
SAMPLING_OF = dict.fromkeys(METHODS, SAMPLING) | {"eagle": PENALIZED, "mtp": SAMPLING}


class Found(NamedTuple):
    """What a scenario gives."""

    outputs: list[list[int]]
    logprobs: list[Any]
    drafts: list[dict[int, list[int]]]


def scenario(
    core: PipelineDriver, num_drafts: int, sampling: list[SamplingSpec], stream: Stream | None = None
) -> Found:
    """Prompts in chunks, drafts that are verified, a wrong one among them, and steps without drafts, two in flight.

    Args:
        core: drives a device or a CPU.
        num_drafts: after each step.
        sampling: sampling of two requests.
        stream: stream of a device with graphs, which are counted; None: they are not.
    """
    requests = [core.admit(slot, prompt(6 - slot, slot), sampling[slot]) for slot in range(2)]

    def step(num: int, chunks: dict[int, int] | None = None, *, verifies: bool = False, wrong: bool = False) -> None:
        draft_tokens = {slot: list(token_ids) for slot, token_ids in core.results[-1].drafts} if verifies else {}
        if wrong and draft_tokens:
            draft_tokens[0] = [*draft_tokens[0][:1], 7]
        core.begin(chunks, draft_tokens=draft_tokens, num_drafts=num and num_drafts)
        core.executor.drain()

    step(1, {0: 4, 1: 5})  # nothing is sampled for the first request yet
    step(1)
    step(1, verifies=True)
    step(0)
    step(1)
    if isinstance(stream, FakeStream):
        stream.num_replays = 0
    step(1, verifies=True, wrong=True)
    if isinstance(stream, FakeStream):
        # The step of the model, its draws if they are made at once, the step of what drafts, a round for each draft.
        assert stream.num_replays == 1 + (sampling is SAMPLING) + 1 + NUM_DRAFTS
    num_results = len(core.results)
    core.begin()
    core.begin()
    is_ahead = core.executor.runner.max_in_flight > 1
    assert len(core.results) == num_results + (0 if is_ahead else 2), "both are in flight"
    core.executor.drain()
    step(1)
    step(0)
    core.executor.close()
    drafts: list[dict[int, list[int]]] = []
    for result in core.results:
        for slot, token_ids in result.earlier_drafts:
            assert drafts[-1][slot] == [UNREAD_DRAFT] * len(token_ids)
            drafts[-1][slot] = list(token_ids)
        drafts.append({slot: list(token_ids) for slot, token_ids in result.drafts})
    return Found([request.outputs for request in requests], [request.logprobs for request in requests], drafts)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("drafters")
    aux = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    return {
        "target": make_tiny("LlamaForCausalLM", directory / "target", num_hidden_layers=2),
        "eagle": make_head("eagle", directory / "eagle"),
        "eagle3": make_head("eagle3", directory / "eagle3", **aux),
        "mtp": make_mtp("DeepseekV3ForCausalLM", directory / "mtp", num_layers=1)[0],
        "draft_model": make_tiny("Qwen2ForCausalLM", directory / "small", seed=1, num_hidden_layers=1),
    }


def configured(paths: dict[str, Path], method: str, device: str) -> ResolvedConfig:
    speculation = {"method": method, "num_speculative_tokens": NUM_DRAFTS}
    if method == "mtp":  # the target has the layer itself
        return worker_config(paths["mtp"], device=device, speculative_config=speculation, **SETTINGS)
    speculation["model"] = str(paths[method])
    return worker_config(paths["target"], device=device, speculative_config=speculation, **SETTINGS)


@pytest.fixture(scope="module")
def computed_on_cpu(paths: dict[str, Path]) -> dict[str, Found]:
    found = {}
    for method in (*METHODS, "mtp"):
        config = configured(paths, method, "cpu")
        found[method] = scenario(driver(loaded(config), config, None), NUM_DRAFTS, SAMPLING_OF[method])
    return found


@pytest.fixture(scope="module")
def without_drafts(paths: dict[str, Path], _kernels_of_gpus: None, device: torch.device) -> list[Found]:
    """Without penalties, and with them."""
    config = worker_config(paths["target"], device="cuda", **SETTINGS)
    model = load_model(config, lambda fraction: None, device=device)
    return [scenario(driver(model, config, new_stream(device)), 0, sampling) for sampling in (SAMPLING, PENALIZED)]


@pytest.mark.parametrize("method", METHODS)
def test_a_device_drafts_as_a_cpu_and_drafts_change_no_bit(
    method: str,
    paths: dict[str, Path],
    computed_on_cpu: dict[str, Found],
    without_drafts: list[Found],
    stream: Stream,
    pytestconfig: pytest.Config,
) -> None:
    config = configured(paths, method, "cuda")
    model = load_model(config, lambda fraction: None, device=stream.torch_device)
    sampling = SAMPLING_OF[method]
    found = scenario(driver(model, config, stream), NUM_DRAFTS, sampling, stream)
    assert found.drafts == computed_on_cpu[method].drafts
    assert sum(map(len, found.drafts)) > 5
    for kind in ("outputs", "logprobs"):
        expected = getattr(without_drafts[sampling is PENALIZED], kind)
        for with_drafts, without in zip(getattr(found, kind), expected, strict=True):
            assert with_drafts[: len(without)] == without
    if method == "eagle3" and pytestconfig.getoption("--long"):  # the others go the same way
        eager = msgspec.structs.replace(config, max_graph_size=0)
        assert scenario(driver(model, eager, new_stream(stream.torch_device)), NUM_DRAFTS, sampling) == found


@pytest.mark.long
def test_a_device_drafts_with_latent_attention_and_experts_as_a_cpu(
    paths: dict[str, Path], computed_on_cpu: dict[str, Found], _kernels_of_gpus: None, stream: Stream
) -> None:
    config = configured(paths, "mtp", "cuda")
    core = driver(load_model(config, lambda fraction: None, device=stream.torch_device), config, stream)
    found = scenario(core, NUM_DRAFTS, SAMPLING_OF["mtp"])
    assert (found.drafts, found.outputs) == (computed_on_cpu["mtp"].drafts, computed_on_cpu["mtp"].outputs)


def test_drafts_are_read_while_the_device_makes_the_next_step_but_at_once_beside_masks(
    paths: dict[str, Path], _kernels_of_gpus: None, stream: Stream
) -> None:
    config = configured(paths, "eagle", "cuda")
    core = driver(load_model(config, lambda fraction: None, device=stream.torch_device), config, stream)
    core.admit(0, prompt(5), spec())
    core.begin(num_drafts=2)
    core.executor.drain()
    core.begin(num_drafts=2, draft_tokens={0: [UNREAD_DRAFT] * 2})
    assert len(core.results) == 1, "the device drafts behind a step whose tokens the host does not know"
    core.executor.drain()
    words = pack_mask(list(range(9)), VOCAB_SIZE).numpy().tobytes()
    core.begin(num_drafts=2, masks=lambda: [(0, 0, words)])
    core.executor.drain()
    core.executor.close()
    first, second, third = core.results
    for result in (first, second):
        assert [(slot, list(token_ids)) for slot, token_ids in result.drafts] == [(0, [UNREAD_DRAFT] * 2)]
    for result in (second, third):
        assert [(slot, len(token_ids)) for slot, token_ids in result.earlier_drafts] == [(0, 2)]
    assert second.drafts_s > first.drafts_s == 0.0
    ((slot, token_ids),) = third.drafts
    assert slot == 0 and len(token_ids) == 2 and min(token_ids) >= 0, "the core looks at them with the grammar"


def test_an_engine_that_drafts_on_a_device_has_the_bits_of_one_without_drafts(
    paths: dict[str, Path], _kernels_of_gpus: None, stream: Stream
) -> None:
    stop = spec(temperature=1.0, seed=3, logprobs=1, max_tokens=6, stop_token_ids=tuple(range(0, VOCAB_SIZE, 9)))
    requests = [
        TimedRequest(prompt(5), spec(logprobs=1, max_tokens=6)),
        TimedRequest(prompt(9, 1), stop),
        TimedRequest(prompt(12, 2), PENALIZED[1], arrives_at=2, aborted_at=7),
        TimedRequest(prompt(6, 3), stop, arrives_at=3),
    ]

    def run(config: ResolvedConfig, stream: Stream) -> tuple[list[Result], EngineStats]:
        model = load_model(config, lambda fraction: None, device=stream.torch_device)
        on_device = DeviceExecutor(model, config, stream)
        engine = SmallEngine(model, config, NUM_BLOCKS, executor=on_device)
        results = engine.run(requests)
        on_device.pipelined.close()
        return results, engine.scheduler.stats()

    expected, _ = run(worker_config(paths["target"], device="cuda", **SETTINGS), new_stream(stream.torch_device))
    config = configured(paths, "eagle", "cuda")
    assert config.speculation is not None
    speculation = msgspec.structs.replace(config.speculation, is_adaptive=False)  # times decide nothing
    found, stats = run(msgspec.structs.replace(config, speculation=speculation), stream)
    aborted = 2
    assert found[:aborted] + found[aborted + 1 :] == expected[:aborted] + expected[aborted + 1 :]
    assert stats.spec_decode_num_draft_tokens > 4


def test_memory_is_measured_with_the_steps_and_graphs_of_what_drafts(
    paths: dict[str, Path], _kernels_of_gpus: None, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(paths, "draft_model", "cuda")
    model = load_model(config, lambda fraction: None, device=stream.torch_device)
    run: list[int] = []
    captured: list[GraphKind] = []
    monkeypatch.setattr(StepGraphs, "_keep_graph", lambda self, kind, *rest: captured.append(kind))
    monkeypatch.setattr(MeasuredDevice, "free_bytes", lambda self: 0)
    original = GraphForward.run

    def run_forward(self: GraphForward, inputs: StepInputs) -> None:
        run.append(len(inputs.token_ids_T))
        original(self, inputs)

    monkeypatch.setattr(GraphForward, "run", run_forward)
    opening.measure(model, MeasuredDevice(stream), config)
    assert run[0] == config.max_num_batched_tokens, "the largest step of the drafter"
    assert captured.count(GraphKind.DECODES) == captured.count(GraphKind.SAMPLES) == 2 * 2
    assert captured.count(GraphKind.ROUNDS) == 2
