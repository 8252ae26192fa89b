"""Prompt embeddings in the steps of a device: the tokens of the CPU, in chunks, through graphs, two steps in flight."""

from pathlib import Path

import pytest
import torch
from gpu_steps import NUM_STEPS, SETTINGS, assert_equal, driver, prompt
from worker_plans import Driver, loaded, spec, worker_config

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.prompt_embeds import PLACEHOLDER, PromptEmbeds
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.models.base import Model

pytestmark = [pytest.mark.filterwarnings("ignore:All-NaN"), pytest.mark.xdist_group("pipeline")]

SPEC = spec(temperature=1.0, seed=7, logprobs=1)
NUM_ROWS = 13


@pytest.fixture(scope="session")
def config(directory: Path) -> ResolvedConfig:
    return worker_config(directory, device="cuda", enable_prompt_embeds=True, **SETTINGS)


def embeds_of(config: ResolvedConfig, seed: int = 0) -> PromptEmbeds:
    width = config.model.embedding_width
    rows = torch.randn(NUM_ROWS, width, generator=torch.Generator().manual_seed(seed)) * 0.3
    return PromptEmbeds.pack([(0, NUM_ROWS)], rows.view(torch.uint8).numpy().tobytes())


PROMPT = [PLACEHOLDER] * NUM_ROWS + [5, 6]


@pytest.fixture(scope="module")
def computed_on_cpu(directory: Path):
    config = worker_config(directory, enable_prompt_embeds=True, **SETTINGS)
    core = Driver(loaded(config), config)
    request = core.admit(0, PROMPT, SPEC, embeds=embeds_of(config))
    core.run(NUM_STEPS)
    return request


def test_the_tokens_of_the_cpu(model: Model, config: ResolvedConfig, stream: Stream, computed_on_cpu) -> None:
    whole = driver(model, config, stream, has_graphs=False)
    alone = whole.admit(0, PROMPT, SPEC, embeds=embeds_of(config))
    whole.run(NUM_STEPS)
    whole.executor.close()
    assert_equal(alone, computed_on_cpu)
    core = driver(model, config, stream)
    core.admit(1, prompt(5), SPEC)
    request = core.admit(3, PROMPT, SPEC, embeds=embeds_of(config))
    other = core.admit(2, PROMPT, SPEC, embeds=embeds_of(config, seed=1))
    core.begin({1: 5, 3: 3})
    core.begin({3: 4, 2: 3})
    core.begin({1: 1, 3: 8, 2: 12})
    core.run(NUM_STEPS - 1)
    core.executor.close()
    assert (request.outputs, request.logprobs) == (alone.outputs, alone.logprobs)
    assert other.logprobs[0] != alone.logprobs[0]
