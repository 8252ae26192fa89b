"""Which steps are graphs, what graphs read, and when they are captured."""

import gc
from types import SimpleNamespace

import msgspec
import pytest
import torch
from fake_device import MeasuredDevice
from fake_stream import FakeGraph, FakeStream
from gpu_steps import SPECS, driver, new_stream, prompt
from triton_interpreter import IS_INTERPRETING
from worker_plans import Running, spec

from octavo.kernels.paged_attention import gpu, gpu_plan
from octavo.protocol.config import ResolvedConfig
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.runners.cuda_graphs import open as opening
from octavo.worker_proc.runners.cuda_graphs import sizes
from octavo.worker_proc.runners.cuda_graphs.runner import CudaGraphRunner
from octavo.worker_proc.runners.cuda_graphs.sizes import GraphKind

pytestmark = [
    # What a step is filled up with reads cache that nobody has written, which holds NaN here.
    pytest.mark.filterwarnings("ignore:All-NaN"),
    # In one process: all of them use the same kernels, and would compile them at the same time.
    pytest.mark.xdist_group("pipeline"),
]


def around_products(graph: FakeGraph) -> tuple[list[str], list[str]]:
    """Return the nodes before the first product of a graph and after the last one."""
    nodes = [node for node in graph.nodes if not node.startswith("aten::empty")]
    last = max(index for index, node in enumerate(nodes) if node == "aten::linear")
    return nodes[: nodes.index("aten::linear")], nodes[last + 2 :]  # rows are put together after each


@pytest.mark.skipif(not IS_INTERPRETING, reason="looks into the stream")
def test_two_steps_are_in_flight_and_graphs_read_what_stays(
    model: Model, config: ResolvedConfig, stream: FakeStream
) -> None:
    core = driver(model, config, stream)
    core.admit(0, prompt(5), spec())
    core.begin()
    core.begin()
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
    prompts, decodes, samples = stream.graphs[:1], stream.graphs[1:3], stream.graphs[3:5]
    reports = stream.graphs[5:]
    assert len(samples) == 2  # of 4 and 1 requests
    for graph in (*prompts, *decodes):
        assert around_products(graph) == (
            ["read_slots_kernel", "embeddings_kernel", "rms_norm_kernel"],
            ["add_rms_norm_kernel", "aten::copy_"],
        )
    search = ["begin_kernel", "narrow_kernel", "narrow_kernel", "collect_kernel", "select_kernel"]
    for graph in samples:
        assert around_products(graph) == (
            ["aten::index_select"],
            ["scan_kernel", *search, "draw_kernel", "record_kernel"],
        )
    assert len(reports) == 2  # of 4 and 1 requests
    for graph in reports:
        last = ["report_part_kernel", "report_row_kernel", "record_kernel"]
        assert around_products(graph)[1] == ["scan_kernel", *search, "draw_kernel", *last]
    gc.collect()
    there = {tensor.untyped_storage().data_ptr() for tensor in gc.get_objects() if isinstance(tensor, torch.Tensor)}
    for graph in stream.graphs:
        assert graph.read <= there, "a graph reads memory that is gone"
    for graphs in (decodes, samples, reports):
        assert all(graph.read == graphs[0].read for graph in graphs), "graphs of two sizes read other memory"
    core.executor.close()


def mixed_steps(model: Model, config: ResolvedConfig, stream: Stream, *, has_graphs: bool) -> list[object]:
    """Return the outputs, logprobs and the cache after decodes and chunks of prompts in the same steps."""
    core = driver(model, config, stream, has_graphs=has_graphs)
    core.admit(0, prompt(6), spec(temperature=1.0, seed=7, logprobs=1))
    core.begin()
    core.admit(2, prompt(6, seed=1), spec(prompt_logprobs=0))
    core.begin({0: 1, 2: 3})
    core.begin({0: 1, 2: 1})
    core.admit(3, prompt(10, seed=2), spec(temperature=1.0, seed=8, frequency_penalty=0.5, logprobs=1))
    core.begin({2: 1, 3: 10})  # nothing is sampled for the request between
    core.begin({0: 1, 2: 1, 3: 1})
    core.executor.drain()
    core.executor.close()
    storage = core.executor.runner.graphs._layers._storage
    cache = torch.cat([tensor.flatten() for tensor in storage.layer(0)]).nan_to_num(nan=-1.0)
    return [*((r.outputs, r.logprobs, r.prompt_logprobs) for r in core.running.values()), cache.tolist()]


def test_chunks_of_prompts_beside_decodes_have_the_same_bits_in_graphs_of_any_size(
    model: Model, config: ResolvedConfig, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding rows write nothing into the cache, too."""
    one_by_one = mixed_steps(model, config, stream, has_graphs=False)
    assert [len(outputs) for outputs, *_ in one_by_one[:3]] == [4, 1, 2], "the first request skips a step"
    monkeypatch.setattr(sizes, "MAX_PROMPT_TOKENS", 16)
    monkeypatch.setattr(sizes, "_PROMPT_STEPS", ((16, 8),))
    other = new_stream(stream.torch_device)
    assert mixed_steps(model, config, other, has_graphs=True) == one_by_one
    if isinstance(other, FakeStream):
        assert len(other.graphs) == 2 + 2 * 2 + 2
        assert other.num_replays == 2 * 5, "every step is a graph, and so is its sampling"


def test_a_step_with_more_tiles_than_its_graph_has_programs_for_takes_a_larger_one_or_none(
    model: Model, config: ResolvedConfig, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = driver(model, config, stream, has_graphs=False).executor.runner.graphs
    found = {size: object() for size in (8, 16, 24)}
    monkeypatch.setattr(graphs, "_sizes", {**graphs._sizes, GraphKind.PROMPTS: sizes.Sizes(found)})
    for size in found:
        captured = SimpleNamespace(num_tiles=[size // 8])
        graphs._graphs[GraphKind.PROMPTS][size] = found[size] = captured
    for num_tiles, size in ((1, 8), (2, 16), (3, 24), (4, None)):
        plans = SimpleNamespace(num_tiles=[num_tiles])
        assert graphs._compute_graph(5, 3, plans) is (found[size] if size else None)


def test_several_ranks_have_graphs_of_the_same_sizes_whatever_each_one_pads(
    model: Model, config: ResolvedConfig, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "_SMALL_DECODES", (1, 2))
    monkeypatch.setattr(type(model.parameters), "unpadded_rows", lambda self, num_rows: num_rows + num_rows % 2)
    for world_size, expected in ((1, [4, 2]), (2, [4, 2, 1])):
        of_rank = msgspec.structs.replace(config, world_size=world_size)
        core = driver(model, of_rank, new_stream(device), has_graphs=False)
        assert core.executor.runner.graphs.uncaptured(GraphKind.DECODES) == expected
        core.executor.close()


def test_requests_that_share_keys_have_the_same_bits_in_one_graph_with_and_without_others(
    model: Model, config: ResolvedConfig, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (gpu_plan, gpu, opening):
        monkeypatch.setattr(module, "SEGMENT", 16)
    counts, original = [], gpu_plan.write

    def write(words, layout, *arguments):
        written = original(words, layout, *arguments)
        counts.append(int(words[layout.num_items]))
        return written

    monkeypatch.setattr(gpu_plan, "write", write)
    prefix, sampling = prompt(20), spec(temperature=1.0, seed=3, logprobs=1)
    prompts = [prefix + prompt(1 + slot, seed=slot) for slot in range(3)]
    found = []
    for slots in ([0, 1, 2], [1]):
        core = driver(model, config, new_stream(device))
        counts.clear()
        requests = {}
        for slot in slots:
            requests[slot] = core.admit(slot, prompts[slot], sampling)
            if slot != slots[0]:
                requests[slot].block_ids = requests[0].block_ids[: 20 // config.block_size]
                requests[slot].num_computed = 20
            core.begin({slot: core.num_uncomputed(slot)})
        core.run(2)
        if len(slots) == 3:
            assert counts[-1] > 0, "nothing is shared"
            before = core.executor.runner.graphs
            core.release(2)
            core.release(0)
            core.run(1)
            assert counts[-1] == 0 and core.executor.runner.graphs is before
        else:
            core.run(1)
            assert not any(counts)
        core.executor.close()
        found.append((requests[1].outputs, requests[1].logprobs))
    assert found[0] == found[1]


def test_decodes_with_more_keys_than_attention_has_memory_for_are_graphs_with_the_same_bits(
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
            assert stream.num_replays == 2 * 3, "only the prompt has no graph"
    assert found[0] == found[1]


def test_memory_is_measured_by_the_largest_steps_and_two_graphs_of_each_kind(
    model: Model, config: ResolvedConfig, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = []
    original = CudaGraphRunner.sample

    def sample(self, samples, *, has_masks, **rest):
        run.append((len(samples), has_masks, {sample.row.sampling.spec.logprobs_mode for sample in samples}))
        return original(self, samples, has_masks=has_masks, **rest)

    monkeypatch.setattr(CudaGraphRunner, "sample", sample)
    monkeypatch.setattr(sizes, "_SMALL_DECODES", (1, 2))
    small = msgspec.structs.replace(config, max_num_batched_tokens=10, max_model_len=8)
    measured = opening.measure(model, MeasuredDevice(stream), small)
    cache_bytes = 4 * 2 * 4 * 2 * 16 * 4  # blocks; keys and values; tokens, heads, dimensions, float32
    assert measured.activation_bytes == 10**6 - cache_bytes
    # One of prompts; then decodes of 4, of 2 and of 1 request, samples of as many, and reports of 4 samples and of 1.
    assert measured.graph_bytes == 100 + (20 + 2 * 5) + (4 + 2 * 1) + (3 + 2)
    assert run[1] == (4, True, {"processed_logprobs"}), "a decode of all requests, each with a mask"


def test_all_graphs_are_captured_before_the_first_step_and_long_lists_leave_them(
    model: Model, config: ResolvedConfig, stream: Stream, expected: dict[str, Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = driver(model, config, stream)
    graphs = core.executor.runner.graphs
    assert not any(graphs.uncaptured(kind) for kind in GraphKind)
    captured = []
    monkeypatch.setattr(stream, "capture", lambda *arguments: captured.append(arguments))
    request = core.admit(0, prompt(5), SPECS["penalized"])
    core.begin()
    core.begin()
    core.admit(1, prompt(5), spec(logit_bias=(*((token_id, -50.0) for token_id in range(70)), (200, 50.0))))
    core.run(1)
    core.executor.close()
    assert request.outputs == expected["penalized"].outputs
    assert core.running[1].outputs == [200]
    assert captured == [], "no step waits for a capture"
