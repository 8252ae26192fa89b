"""Steps on a device, two in flight, through graphs: the tokens of the CPU, and the same bits in any company.

On a GPU with its own stream. In the interpreter with a stream that records graphs and finds what a real one would do
wrong without a word (tests/support/fake_stream.py), and with products that are torch's, row by row.
"""

# long: the fixtures compile kernels and are shared by every test

import gc
import importlib
import pkgutil
import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from fake_device import MeasuredDevice, RowByRow, converse, one_by_one
from fake_stream import FakeEvent, FakeStream
from pipeline_driver import PipelineDriver
from tiny_models import VOCAB_SIZE, make_tiny
from triton_interpreter import IS_INTERPRETING
from worker_plans import Running, alone, loaded, spec, worker_config

from octavo import BatchUpdate, LogitsProcessor, kernels
from octavo.kernels import dispatch, rope_store_kv
from octavo.kernels.linear import gpu as linear_gpu
from octavo.kernels.paged_attention import gpu, gpu_plan
from octavo.kernels.token_mask import pack_mask
from octavo.protocol.channel import Publisher, ResultPull
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import (
    NO_TOKEN,
    Admitted,
    AllocateCache,
    CacheReady,
    Scheduled,
    StepFault,
    StepPlan,
    TokenMask,
    TokenMasks,
)
from octavo.worker_proc.device.cuda import CudaDevice
from octavo.worker_proc.device.cuda_stream import CudaStream
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.executor.open import open_executor
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.runners.cuda_graphs import open as opening
from octavo.worker_proc.runners.cuda_graphs.runner import CudaGraphRunner
from octavo.worker_proc.sampling.processors import ProcessorFactory, Processors
from octavo.worker_proc.weights.load import load_model

pytestmark = [
    # What a step is filled up with reads cache that nobody has written, which holds NaN here.
    pytest.mark.filterwarnings("ignore:All-NaN"),
    # In one process: all of them use the same kernels, and would compile them at the same time.
    pytest.mark.xdist_group("pipeline"),
]

NUM_BLOCKS = 64
NUM_STEPS = 3
SETTINGS = {"max_num_seqs": 4, "max_model_len": 64, "block_size": 4, "max_num_batched_tokens": 64}

SPECS: Mapping[str, SamplingSpec] = {
    "greedy": spec(logprobs=3),
    "filtered": spec(temperature=0.7, seed=2**64 - 1, top_k=20, top_p=0.9, min_p=0.01, logprobs=2),
    "penalized": spec(
        temperature=0.9, seed=3, presence_penalty=0.7, frequency_penalty=0.3, repetition_penalty=1.2, logprobs=2
    ),
    "named": spec(temperature=1.0, seed=10, logprobs=0, logprob_token_ids=(9, 300, 11)),
    "biased": spec(temperature=1.0, seed=5, logit_bias=((17, 8.0), (18, -100.0)), prompt_logprobs=2),
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


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("tiny"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def config(directory: Path) -> ResolvedConfig:
    return worker_config(directory, device="cuda", **SETTINGS)


@pytest.fixture(scope="module")
def expected(directory: Path) -> dict[str, Running]:
    """What the CPU gives, each request alone."""
    on_cpu = worker_config(directory, **SETTINGS)
    model = loaded(on_cpu)
    return {name: alone(model, on_cpu, prompt(5), sampling, NUM_STEPS) for name, sampling in SPECS.items()}


@pytest.fixture(scope="module")
def _kernels_of_gpus(followed_on_cpu: object, expected: dict[str, Running]) -> Iterator[None]:
    """In the interpreter the tensors of the CPU go to the kernels of GPUs, from here on."""
    patch = pytest.MonkeyPatch()
    if IS_INTERPRETING:
        original = dispatch.choose

        def choose(operation, implementations, device):
            return original(operation, implementations, torch.device("cuda"))

        for _, name, _ in pkgutil.iter_modules(kernels.__path__):
            package = importlib.import_module(f"octavo.kernels.{name}")
            if hasattr(package, "choose"):
                patch.setattr(package, "choose", choose)
        patch.setitem(rope_store_kv._IMPLEMENTATIONS, "cuda", one_by_one)
        patch.setattr(linear_gpu, "new_packer", lambda *, is_batch_invariant: RowByRow())
    yield
    patch.undo()


@pytest.fixture(scope="module")
def model(config: ResolvedConfig, _kernels_of_gpus: None, device: torch.device) -> Model:
    return load_model(config, lambda fraction: None, device=device)


@pytest.fixture
def stream(device: torch.device) -> Stream:
    return new_stream(device)


def new_stream(device: torch.device) -> Stream:
    if IS_INTERPRETING:
        return FakeStream()
    return CudaStream(device)


def driver(
    model: Model, config: ResolvedConfig, stream: Stream | None, processors: Processors | None = None
) -> PipelineDriver:
    with torch.inference_mode():
        return PipelineDriver(
            lambda deliver: open_executor(
                model,
                config,
                stream,
                deliver,
                num_blocks=[NUM_BLOCKS],
                max_model_len=config.max_model_len,
                processors=processors,
            ),
            num_blocks=NUM_BLOCKS,
            block_size=config.block_size,
        )


def assert_equal(request: Running, expected: Running) -> None:
    """The same tokens, and logprobs that are equal but for rounding."""
    assert request.outputs[: len(expected.outputs)] == expected.outputs
    for found, wanted in zip(
        request.logprobs + request.prompt_logprobs, expected.logprobs + expected.prompt_logprobs, strict=True
    ):
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            assert found.token_ids == wanted.token_ids
            assert found.rank == wanted.rank
            assert found.logprobs == pytest.approx(wanted.logprobs, abs=2e-4)


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


@pytest.fixture(scope="module")
def followed_on_cpu(directory: Path) -> tuple[list[Running], list[StepFault]]:
    on_cpu = worker_config(directory, **SETTINGS)
    return followed(loaded(on_cpu), on_cpu, None)


def test_logits_processors_see_the_tokens_before_and_the_tokens_are_those_of_the_cpu(
    model: Model, config: ResolvedConfig, stream: Stream, followed_on_cpu: tuple[list[Running], list[StepFault]]
) -> None:
    found, faults = followed(model, config, stream)
    for request, wanted in zip(found[::2], followed_on_cpu[0][::2], strict=True):
        assert_equal(request, wanted)
    assert found[0].outputs[4] == found[0].outputs[3] + 1, "the processor knew every token"
    assert faults == followed_on_cpu[1] == [StepFault(1, "a logits processor raised ValueError: as it was told")]


def test_the_same_bits_in_chunks_in_company_and_through_graphs(
    model: Model, config: ResolvedConfig, stream: Stream
) -> None:
    sampling = spec(temperature=1.0, seed=7, logprobs=1)
    eager = driver(model, msgspec.structs.replace(config, max_graph_size=0), stream)
    alone_request = eager.admit(0, prompt(11, seed=1), sampling)
    eager.run(NUM_STEPS)
    eager.executor.close()
    core = driver(model, config, stream)
    core.admit(1, prompt(5), spec())
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


@pytest.mark.skipif(not IS_INTERPRETING, reason="looks into the stream")
def test_two_steps_are_in_flight_and_graphs_read_what_stays(
    model: Model, config: ResolvedConfig, stream: FakeStream
) -> None:
    core = driver(model, config, stream)
    core.admit(0, prompt(5), spec())
    core.begin()
    core.begin()  # captures a graph, which waits for the device
    core.executor.drain()
    num_waits, num_uploads, num_replays = stream.num_waits, stream.num_uploads, stream.num_replays
    core.begin()
    core.begin()
    assert (stream.num_waits, len(core.results)) == (num_waits, 2), "nothing was waited for"
    core.begin()
    assert (stream.num_waits, len(core.results)) == (num_waits + 1, 3), "the third waits for the first"
    assert stream.num_uploads == num_uploads + 3
    assert stream.num_replays == num_replays + 2 * 3
    core.executor.drain()
    core.executor.prepare()
    assert len(stream.graphs) == 2 * 3  # of 1, 4 and 2 requests
    gc.collect()
    there = {tensor.untyped_storage().data_ptr() for tensor in gc.get_objects() if isinstance(tensor, torch.Tensor)}
    for graph in stream.graphs:
        assert graph.read <= there, "a graph reads memory that is gone"
    for graph in stream.graphs[2:]:
        assert graph.read == stream.graphs[stream.graphs.index(graph) % 2].read, "graphs of two sizes read other memory"
    core.executor.close()


def test_decodes_with_more_keys_than_attention_has_memory_for_have_no_graph_and_the_same_bits(
    model: Model, config: ResolvedConfig, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (gpu_plan, gpu, opening):
        monkeypatch.setattr(module, "SEGMENT", 16)
    found = []
    for num_bytes in (2**28, 0):
        monkeypatch.setattr(opening, "MAX_PARTIAL_BYTES", num_bytes)
        stream = new_stream(device)
        core = driver(model, config, stream)
        request = core.admit(0, prompt(15), spec(temperature=1.0, seed=3, logprobs=1))
        core.run(4)  # the second decode has two segments
        core.executor.close()
        found.append((request.outputs, request.logprobs))
        if isinstance(stream, FakeStream):
            assert stream.num_replays == 2 * (3 if num_bytes else 1)
    assert found[0] == found[1]


def test_memory_is_measured_by_the_largest_steps_and_two_graphs(
    model: Model, config: ResolvedConfig, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = []
    original = CudaGraphRunner.sample

    def sample(self, samples, *, has_masks, change_logits=None):
        run.append((len(samples), has_masks, {sample.row.sampling.spec.logprobs_mode for sample in samples}))
        return original(self, samples, has_masks=has_masks, change_logits=change_logits)

    monkeypatch.setattr(CudaGraphRunner, "sample", sample)
    small = msgspec.structs.replace(config, max_num_batched_tokens=10, max_model_len=8)
    measured = opening.measure(model, MeasuredDevice(stream), small)
    cache_bytes = 4 * 2 * 4 * 2 * 16 * 4  # blocks; keys and values; tokens, heads, dimensions, float32
    assert measured.activation_bytes == 10**6 - cache_bytes
    assert measured.graph_bytes == 100 + 2 * 10  # of 4, of 2 and of 1 request
    assert run[1] == (4, True, {"processed_logprobs"}), "a decode of all requests, each with a mask"


def test_all_graphs_are_captured_before_the_first_step_and_long_lists_leave_them(
    model: Model, config: ResolvedConfig, stream: Stream, expected: dict[str, Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = driver(model, config, stream)
    core.executor.prepare()
    graphs = core.executor.runner.graphs
    assert graphs.uncaptured == []
    captured = []
    monkeypatch.setattr(graphs, "capture", captured.append)
    request = core.admit(0, prompt(5), SPECS["penalized"])
    core.begin()
    core.begin()
    core.admit(1, prompt(5), spec(logit_bias=(*((token_id, -50.0) for token_id in range(70)), (200, 50.0))))
    core.run(1)
    core.executor.close()
    assert request.outputs == expected["penalized"].outputs
    assert core.running[1].outputs == [200]
    assert captured == [], "no step waits for a capture"


@pytest.mark.skipif(not IS_INTERPRETING, reason="needs no GPU")
def test_a_worker_goes_on_while_its_device_computes(model: Model, config: ResolvedConfig, tmp_path: Path) -> None:
    """Plans come two at once, and results come by themselves, in order."""
    heard = []

    def talk(commands: Publisher, replies: ResultPull) -> None:
        commands.send(AllocateCache(0, [NUM_BLOCKS], 64))
        heard.append(replies.receive(60.0))  # captures the graphs first
        admitted = [Admitted(0, "", pack_ids(prompt(5)), 5, [[3, 1]], spec())]
        commands.send(StepPlan(1, [], admitted, [], [Scheduled(0, 0, 5, 1)]))
        commands.send(StepPlan(2, [], [], [], [Scheduled(0, 5, 1, 1)]))
        heard.extend(replies.receive(30.0) for _ in range(2))
        commands.send(StepPlan(3, [], [], [], [Scheduled(0, 6, 1, 1)], awaits_masks=True))
        commands.send(TokenMasks.pack(4, [(0, 0, pack_mask([9], config.model.vocab_size).numpy().tobytes())]))
        heard.append(replies.receive(30.0))

    converse(model, config, tmp_path, talk)
    assert heard[0] == CacheReady(0, 0)
    assert [result.sequence for result in heard[1:]] == [1, 2, 3]
    assert heard[3].token_ids.tolist() == [9]
    assert all(result.elapsed_s > 0 for result in heard[1:])


@pytest.mark.skipif(not IS_INTERPRETING, reason="needs no GPU")
def test_a_device_that_fails_while_a_step_is_on_it_ends_its_worker_with_the_cause(
    model: Model, config: ResolvedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks the device anything but the thread that waits for it."""
    heard = []

    def fail(event: FakeEvent) -> bool:
        raise RuntimeError("an illegal memory access")

    def talk(commands: Publisher, replies: ResultPull) -> None:
        commands.send(AllocateCache(0, [NUM_BLOCKS], 64))
        heard.append(replies.receive(10.0))
        commands.send(StepPlan(1, [], [], [], []))
        heard.append(replies.receive(10.0))

    monkeypatch.setattr(FakeEvent, "wait", fail)
    monkeypatch.setattr(FakeEvent, "is_done", fail)
    eager = msgspec.structs.replace(config, max_graph_size=0)
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        converse(model, eager, tmp_path, talk)
    assert (heard[1].sequence, heard[1].message) == (1, "an illegal memory access")


@pytest.mark.skipif(IS_INTERPRETING, reason="needs a GPU")
def test_the_stream_of_a_gpu(device: torch.device) -> None:
    stream = CudaStream(device)
    numbers = torch.zeros(4, dtype=torch.int64, device=device)
    buffer = stream.host_buffer(numbers.nbytes)
    assert buffer.is_pinned()
    graph = stream.capture(lambda: numbers.add_(1), stream.new_graph_pool())
    buffer.view(torch.int64)[:] = torch.arange(4)
    stream.upload(numbers.view(torch.uint8), buffer)
    for _ in range(3):
        graph.replay()
    found, event = stream.download(numbers), stream.record_event()
    event.wait()
    assert event.is_done()
    assert found.tolist() == [3, 4, 5, 6]


@pytest.mark.alone
@pytest.mark.skipif(IS_INTERPRETING, reason="needs a GPU")
def test_a_gpu_counts_its_memory() -> None:
    gpu = CudaDevice(0, is_deterministic=True)
    assert 0 < gpu.free_bytes() <= gpu.total_bytes
    gpu.reset_peak()
    torch.empty(2**26, dtype=torch.uint8, device=gpu.torch_device)  # given back at once, and seen all the same
    assert 2**26 <= gpu.peak_growth_bytes() < 2**27
