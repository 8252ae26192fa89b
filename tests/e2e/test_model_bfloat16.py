"""Families in bfloat16: as close to exact logprobs as `transformers` in bfloat16."""

from pathlib import Path

import pytest
import torch
import transformers
from model_runner import Runner, load, prompts
from tiny_families import FAMILIES
from tiny_models import MOE_ARCHITECTURES, make_tiny
from torch import Tensor

from octavo.kernels.native import library

DEFAULT = ("gemma3", "phi3", "falcon-40b", "cohere-norms", "olmo2", "DeepseekV3ForCausalLM", "GptOssForCausalLM")
"""The others are compared with `--long`."""
FACTOR = 1.5
"""Our mean error is at most so many times theirs. In most families it is smaller, because fewer numbers are rounded."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.long) for name in (*FAMILIES, *MOE_ARCHITECTURES)],
)
def test_bfloat16_is_as_exact_as_in_transformers(family: str, tmp_path: Path) -> None:
    arch, class_name, settings = FAMILIES.get(family, (family, None, {}))
    path = make_tiny(arch, tmp_path / family, class_name=class_name, **settings)
    tokens = prompts(320)[0]
    exact = logprobs_of_transformers(path, torch.float32, tokens)
    theirs = error(logprobs_of_transformers(path, torch.bfloat16, tokens), exact)
    runner = Runner(load(path, torch.bfloat16, library.load()), torch.bfloat16)
    ours = error(runner.in_chunks([tokens], 0, [len(tokens)]).float().log_softmax(1), exact)
    assert 0 < ours <= FACTOR * theirs, f"{ours:.2e}, and {theirs:.2e} in transformers"


def logprobs_of_transformers(path: Path, dtype: torch.dtype, tokens: Tensor) -> Tensor:
    """Return the logprobs after each token, computed in `dtype` with weights that are rounded to bfloat16."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
        logits: Tensor = model(tokens[None]).logits[0]
    return logits.float().log_softmax(1)


def error(actual: Tensor, exact: Tensor) -> float:
    """Return the mean distance. A mean, because a router that chooses another expert changes single rows much."""
    return float((actual - exact).abs().mean())
