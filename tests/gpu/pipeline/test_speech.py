"""Transcriptions in the steps of a device: the tokens of the CPU by both forms of the rules, in company and graphs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_steps import assert_equal, driver
from pipeline_driver import PipelineDriver
from tiny_whisper import make_whisper
from worker_plans import Driver, Running, loaded, spec, worker_config

from octavo.frontend.audio.speech_tokens import SpeechTokens
from octavo.protocol.buffers import Buffer
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.media import EncoderInput, MediaTensor, StepMedia, digest_of
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.weights.load import load_model

pytestmark = [pytest.mark.filterwarnings("ignore:All-NaN"), pytest.mark.xdist_group("pipeline")]

SETTINGS = {"max_num_seqs": 2, "max_model_len": 64, "block_size": 4, "max_num_batched_tokens": 24}
NUM_STEPS = 3


def waveform(seed: int) -> EncoderInput:
    frames = np.random.default_rng(seed).standard_normal((20, 100)).astype(np.float32)
    tensors = {"input_features": MediaTensor("float32", list(frames.shape), Buffer(frames.tobytes()))}
    return EncoderInput(digest_of(tensors), 0, tensors, "audio")


CLIPS = [waveform(0), waveform(1)]


def media(slots: list[int]) -> StepMedia:
    """The media of a step in which these requests attend to the clips of their slots."""
    chosen = [CLIPS[slot] for slot in slots]
    return StepMedia([], chosen, [], [one.digest for one in chosen], [(slot, at) for at, slot in enumerate(slots)])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def config(path: Path) -> ResolvedConfig:
    return worker_config(path, device="cuda", **SETTINGS)


@pytest.fixture(scope="module")
def computed_on_cpu(path: Path) -> list[Running]:
    config = worker_config(path, **SETTINGS)
    model = loaded(config, is_native=False)
    found = []
    for slot in range(len(CLIPS)):
        core = Driver(model, config)
        found.append(admit(core, path, slot))
        core.step(media=media([slot]))
        core.run(NUM_STEPS - 1)
    return found


@pytest.fixture(scope="module")
def model(config: ResolvedConfig, _kernels_of_gpus: None, device: torch.device) -> Model:
    return load_model(config, lambda fraction: None, device=device)


def admit(core: Driver | PipelineDriver, path: Path, slot: int) -> Running:
    """Admit a request with timestamps in slot 0, and one of text alone in slot 1."""
    tokens, has_timestamps = SpeechTokens.of(str(path)), slot == 0
    prompt = tokens.prompt("en", "transcribe", [], 64, has_timestamps=has_timestamps)
    sampling = spec(temperature=1.0, seed=7 + slot, logprobs=1, speech_rules=tokens.rules(has_timestamps))
    return core.admit(slot, prompt, sampling)


def test_the_tokens_of_the_cpu(
    path: Path, model: Model, config: ResolvedConfig, stream: Stream, computed_on_cpu: list[Running]
) -> None:
    core = driver(model, config, stream)
    requests = [admit(core, path, slot) for slot in range(len(CLIPS))]
    core.begin(media=media([0, 1]))
    core.run(NUM_STEPS - 1)
    core.executor.drain()
    core.executor.close()
    for request, expected in zip(requests, computed_on_cpu, strict=True):
        assert_equal(request, expected)
