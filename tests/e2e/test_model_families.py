"""The dense families against `transformers` on the same weights, and against themselves in other batches."""

from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from model_runner import Runner, load, prompts
from tiny_families import FAMILIES
from tiny_models import make_tiny
from torch import Tensor

from octavo.kernels.native import library
from octavo.kernels.native.library import NativeLibrary

MAX_LEN = 512


@pytest.fixture(scope="module", params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> NativeLibrary | None:
    """What models compute with."""
    return library.load() if request.param == "native" else None


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def tiny(name: str, root: Path) -> Path:
    arch, class_name, settings = FAMILIES[name]
    directory = root / name
    return directory if directory.exists() else make_tiny(arch, directory, class_name=class_name, **settings)


@cache
def expected(path: Path) -> tuple[list[Tensor], Tensor]:
    """Return what `transformers` computes: the logits of the prompts, and one of them with 24 greedy tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    tokens = prompts(model.config.vocab_size)
    with torch.inference_mode():
        logits = [model(prompt[None]).logits[0] for prompt in tokens]
    prompt = tokens[1]
    known = prompt
    with torch.inference_mode():
        for _ in range(24):
            known = torch.cat((known, model(known[None]).logits[0, -1].argmax()[None]))
    return logits, known


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens_equal_transformers(family: str, root: Path, kernels: NativeLibrary | None) -> None:
    path = tiny(family, root)
    logits, greedy = expected(path)
    runner = Runner(load(path, torch.float32, kernels), torch.float32, MAX_LEN)
    tokens = prompts(320)
    for request, theirs in enumerate(logits):
        actual = runner.in_chunks(tokens, request, [len(tokens[request])])
        torch.testing.assert_close(actual.log_softmax(1), theirs.log_softmax(1), rtol=1e-4, atol=1e-4)
    known = tokens[1]
    last = runner.step([known], [(0, 0, len(known))])[0][-1]
    for _ in range(24):
        known = torch.cat((known, last.argmax()[None]))
        last = runner.step([known], [(0, len(known) - 1, len(known))])[0][-1]
    assert torch.equal(known, greedy)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_batches_do_not_change_a_bit(family: str, root: Path, kernels: NativeLibrary | None) -> None:
    # bfloat16 through torch and float32 in programs: each path has one type in which more is rounded.
    dtype = torch.bfloat16 if kernels is None else torch.float32
    model = load(tiny(family, root), dtype, kernels)
    tokens = prompts(320)
    runner = Runner(model, dtype, MAX_LEN)
    whole = [runner.in_chunks(tokens, request, [len(tokens[request])]) for request in range(3)]
    assert all(bool(logits.isfinite().all()) for logits in whole)
    for ends in ([7, 8, 9, 60, 73, 130, 200], [1, 199, 200]):
        assert torch.equal(runner.in_chunks(tokens, 0, ends), whole[0]), ends
    parts = [(0, 0, 130), (1, 0, 5), (2, 0, 131)], [(0, 130, 131), (1, 5, 37)], [(0, 131, 132), (2, 130, 131)]
    for step in parts:
        for logits, (request, start, end) in zip(runner.step(tokens, step), step, strict=True):
            assert torch.equal(logits, whole[request][start:end]), (request, start, end)
