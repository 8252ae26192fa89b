"""A trainer has the logprobs of the engine that samples for it, bit for bit, and the gradients of torch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import make_tiny

from octavo import LLM, SamplingParams
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.training import SamplerForward, exact_logprobs

PROMPTS = ["The fox", "One request, one batch, one block: " * 6, "x"]


def tiny(path: Path, **changes: Any) -> Path:
    make_tiny("LlamaForCausalLM", path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logprobs_have_the_bits_of_the_sampler(tmp_path: Path, dtype: str) -> None:
    path = tiny(tmp_path / "model")
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, logprobs=0)
    settings: dict[str, Any] = {
        "max_model_len": 256,
        "kv_cache_memory_bytes": 16 << 20,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 8,
    }
    with LLM(str(path), dtype=dtype, **settings) as llm:
        outputs = llm.generate(PROMPTS * 3, params, use_tqdm=False)
        forward = SamplerForward(llm.client.facts.config)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    forward.load(model.state_dict().items())
    for output in outputs[:4]:
        (completion,) = output.outputs
        tokens = [*output.prompt_token_ids, *completion.token_ids]
        sampled = [row[token].logprob for row, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        logprobs = exact_logprobs(model, forward, tokens)[-len(sampled) :]
        assert logprobs.tolist() == sampled
        ratios = (logprobs - torch.tensor(sampled)).exp()
        assert torch.equal(ratios.detach(), torch.ones_like(ratios))


def test_gradients_are_those_of_torch_and_weights_can_change(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model")
    with LLM(str(path), dtype="float32", max_model_len=256, kv_cache_memory_bytes=16 << 20) as llm:
        forward = SamplerForward(llm.client.facts.config)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = torch.randint(3, 300, (70,), generator=torch.Generator().manual_seed(0)).tolist()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = 0.0
    for _ in range(3):
        forward.load(model.state_dict().items())
        exact = exact_logprobs(model, forward, tokens)
        logits = model(torch.tensor([tokens[:-1]])).logits[0]
        plain = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        torch.testing.assert_close(exact, plain, atol=1e-4, rtol=1e-4)
        wanted = torch.autograd.grad(plain.mean(), list(model.parameters()))
        optimizer.zero_grad()
        (-exact.mean()).backward()
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, -gradient)
        optimizer.step()
        assert before == 0.0 or float(exact.mean().detach()) > before
        before = float(exact.mean().detach())


def test_what_has_no_exact_forward_is_refused(tmp_path: Path) -> None:
    path = tiny(tmp_path / "model")
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "kv_cache_memory_bytes": 16 << 20}
    with LLM(str(path), cpu_kernels="torch", **settings) as llm, pytest.raises(ConfigError, match="native kernels"):
        SamplerForward(llm.client.facts.config)
    with LLM(str(path), **settings) as llm:
        forward = SamplerForward(llm.client.facts.config)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    forward.load(model.state_dict().items())
    for tokens in ([1], [1] * 65):
        with pytest.raises(ValueError, match="takes 2 to 64"):
            forward.logprobs(tokens)
    with pytest.raises(ConfigError, match="norm"):
        forward.load((name, values) for name, values in model.state_dict().items() if not name.endswith("norm.weight"))
