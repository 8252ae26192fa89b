"""A worker whose device computes while it goes on; the stream and the memory of a GPU."""

from pathlib import Path

import msgspec
import pytest
import torch
from fake_device import converse
from fake_stream import FakeEvent
from gpu_steps import prompt
from triton_interpreter import IS_INTERPRETING
from worker_plans import NUM_BLOCKS, spec

from octavo.kernels.token_mask import pack_mask
from octavo.protocol.channel import Publisher, ResultPull
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.ids import pack_ids
from octavo.protocol.steps import Admitted, Scheduled, StepPlan, TokenMasks
from octavo.protocol.worker_commands import AllocateCache, CacheReady, WarmUp
from octavo.worker_proc.device.cuda import CudaDevice
from octavo.worker_proc.device.cuda_stream import CudaStream
from octavo.worker_proc.models.base import Model

pytestmark = [
    # What a step is filled up with reads cache that nobody has written, which holds NaN here.
    pytest.mark.filterwarnings("ignore:All-NaN"),
    # In one process: all of them use the same kernels, and would compile them at the same time.
    pytest.mark.xdist_group("pipeline"),
]


@pytest.mark.skipif(not IS_INTERPRETING, reason="needs no GPU")
def test_a_worker_goes_on_while_its_device_computes(model: Model, config: ResolvedConfig, tmp_path: Path) -> None:
    """Plans come two at once, and results come by themselves, in order."""
    heard = []

    def talk(commands: Publisher, replies: ResultPull) -> None:
        commands.send(AllocateCache(0, [NUM_BLOCKS], 64))
        heard.append(replies.receive(10.0))
        commands.send(WarmUp(1))
        heard.append(replies.receive(60.0))
        admitted = [Admitted(0, "", pack_ids(prompt(5)), 5, [[3, 1]], spec())]
        commands.send(StepPlan(2, [], admitted, [], [Scheduled(0, 0, 5, 1)]))
        commands.send(StepPlan(3, [], [], [], [Scheduled(0, 5, 1, 1)]))
        heard.extend(replies.receive(30.0) for _ in range(2))
        commands.send(StepPlan(4, [], [], [], [Scheduled(0, 6, 1, 1)], awaits_masks=True))
        commands.send(TokenMasks.pack(5, [(0, 0, pack_mask([9], config.model.vocab_size).numpy().tobytes())]))
        heard.append(replies.receive(30.0))

    converse(model, config, tmp_path, talk)
    assert heard[0] == CacheReady(0, 0)
    assert (heard[1].sequence, heard[1].num_graphs) == (1, 1 + 2 * 2 + 2)
    assert heard[1].elapsed_s > 0
    assert [result.sequence for result in heard[2:]] == [2, 3, 4]
    assert heard[4].token_ids.tolist() == [9]
    assert all(result.elapsed_s > 0 for result in heard[2:])


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
