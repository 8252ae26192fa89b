"""llama.cpp loads the GGUF files that `octavo quantize` writes, and computes from them what octavo computes."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from client_environments import NotInstallable, isolated_variables, python_environment
from model_logprobs import difference
from tiny_models import VOCAB_SIZE, make_tiny

from octavo import LLM, SamplingParams
from octavo.frontend.cli.main import main

pytestmark = pytest.mark.clients

PACKAGES = ("xllamacpp==2026.10.11549",)
"""llama.cpp and its server as a Python module."""
PROGRAM = Path(__file__).parent / "programs" / "llama_cpp_program.py"
PROMPT = [5, 6, 7, 8, 200, 17, 300, 44, 9, 101, 33, 250]
TEXT = "The quick brown fox jumps over 3 dogs"
NUM_TOKENS = 12
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_logprobs": -1, "kv_cache_memory_bytes": 16 << 20}
MOST_DIFFERENCE = 0.1
"""Between logprobs, relative to how much they vary: 0.02 to 0.05, as llama.cpp rounds rows to 8 bits."""


@pytest.mark.parametrize(
    ("arch", "kind"),
    [
        ("LlamaForCausalLM", "Q8_0"),
        ("LlamaForCausalLM", "Q5_1"),
        ("MistralForCausalLM", "Q4_0"),
        ("Qwen2ForCausalLM", "Q4_1"),
        ("Qwen3ForCausalLM", "Q5_0"),
    ],
)
def test_llama_cpp_gives_the_tokens_of_octavo(arch: str, kind: str, tmp_path: Path) -> None:
    try:
        environment = python_environment(PACKAGES)
    except NotInstallable as error:
        pytest.skip(str(error))
    model, out = make_tiny(arch, tmp_path / "model", **SIZES), tmp_path / "model.gguf"
    flags = ["--format", "gguf", "--gguf-type", kind, "--no-evaluation"]
    assert main(["quantize", str(model), str(out), *flags]) == 0
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=-1)
    with LLM(str(out), dtype="float32", quantization="none", **SETTINGS) as llm:
        answers = llm.generate([{"prompt_token_ids": PROMPT}, TEXT], greedy, use_tqdm=False)
        letter = str(llm.get_tokenizer().encode("e", add_special_tokens=False)[0])
    first, second = (answer.outputs[0] for answer in answers)
    prompts = [TEXT, *([*PROMPT, *first.token_ids[:count]] for count in range(NUM_TOKENS))]
    done = subprocess.run(
        [*environment.interpreter, str(PROGRAM), str(out), json.dumps(prompts), str(VOCAB_SIZE), letter],
        env=isolated_variables(tmp_path),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    theirs = torch.tensor(json.loads(done.stdout.splitlines()[-1]))
    rows = [*(second.logprobs or [])[:1], *(first.logprobs or [])]
    ours = torch.tensor([[row[token].logprob for token in range(VOCAB_SIZE)] for row in rows])
    assert difference(theirs, ours) < MOST_DIFFERENCE
    assert (theirs.argmax(1) == ours.argmax(1)).float().mean() >= 0.75
