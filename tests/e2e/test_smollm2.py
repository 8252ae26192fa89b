"""The default model, SmolLM2-135M from its GGUF, against transformers on the same weights in float32."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers_gguf import from_gguf
from workloads import bits

from octavo.frontend.llm import LLM
from octavo.protocol.params import SamplingParams

MAX_NEW_TOKENS = 24
END_OF_TURN = 2
CHUNK = 64

NUM_SHORT = 6
"""Number of conversations that the default run compares; `--long` compares all of them."""

CONVERSATIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a five-year-old.",
    "List three prime numbers larger than 20.",
    "Translate 'good morning' into Spanish.",
    "def fibonacci(n):\n    # complete this function",
    "Why is the sky blue? 🌈",
    "Summarize: The quick brown fox jumps over the lazy dog.",
    "What is 17 + 25?",
    "Write a JSON object with the keys name and age.",
    "Tell me a short story about a robot\tand a cat.",
]

LONG_PROMPT = "Repeat the last sentence. " + " ".join(
    f"Sentence number {i} speaks of the number {i * i}." for i in range(25)
)


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(
        str(smollm2_gguf), dtype="float32", max_model_len=4096, max_num_seqs=16, max_num_batched_tokens=CHUNK
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> Any:
    """Return the model of transformers with the same weights."""
    import torch
    from transformers import AutoModelForCausalLM

    return from_gguf(AutoModelForCausalLM, smollm2_gguf, dtype=torch.float32)


def most_likely(model: Any, prompt: list[int], continuation: list[int]) -> list[int]:
    """Return the token with the largest logit of transformers at each position of a continuation.

    If these are the continuation itself, transformers decodes it greedily too; one pass is cheaper than decoding.
    """
    import torch

    with torch.inference_mode():
        whole = torch.tensor([prompt + continuation])
        logits = model(whole, logits_to_keep=len(continuation) + 1, use_cache=False).logits
    return logits[0, :-1].argmax(-1).tolist()


def prompt_tokens(llm: LLM, text: str) -> list[int]:
    rendered = llm.client.chat_template().render([{"role": "user", "content": text}], add_generation_prompt=True)
    return llm.client.tokenizer.encode(rendered, add_special_tokens=False)


def test_greedy_tokens_are_those_of_transformers(llm: LLM, reference: Any, pytestconfig: pytest.Config) -> None:
    texts = [*(CONVERSATIONS if pytestconfig.getoption("--long") else CONVERSATIONS[:NUM_SHORT]), LONG_PROMPT]
    assert len(prompt_tokens(llm, LONG_PROMPT)) > 4 * CHUNK, "longer than several chunks"
    params = SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS)
    conversations = [[{"role": "user", "content": text}] for text in texts]
    outputs = llm.chat(conversations, params, use_tqdm=False)
    for text, output in zip(texts, outputs, strict=True):
        token_ids = output.outputs[0].token_ids
        assert token_ids == most_likely(reference, prompt_tokens(llm, text), token_ids), text
        assert len(token_ids) == MAX_NEW_TOKENS or token_ids[-1] == END_OF_TURN
        assert END_OF_TURN not in token_ids[:-1]


def test_decode_logprobs_are_the_prefill_logprobs_of_the_same_tokens(llm: LLM) -> None:
    prompt = prompt_tokens(llm, CONVERSATIONS[0])
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=0, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    decoded = output.outputs[0]
    again = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (check,) = llm.generate([prompt + decoded.token_ids], again, use_tqdm=False)
    assert decoded.logprobs is not None
    assert check.prompt_logprobs is not None
    prefilled = check.prompt_logprobs[len(prompt) :]
    for token_id, one, other in zip(decoded.token_ids, decoded.logprobs, prefilled, strict=True):
        assert other is not None
        assert bits(one[token_id].logprob) == bits(other[token_id].logprob)
        assert one[token_id].rank == other[token_id].rank


def test_rounded_rows_keep_the_answer(smollm2_gguf: Path, llm: LLM) -> None:
    """The two likeliest first tokens are 0.08 nats apart: 8-bit rows swapped them (docs/evaluation.md)."""
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=1)
    conversation = [{"role": "user", "content": CONVERSATIONS[0]}]
    (exact,) = llm.chat(conversation, params, use_tqdm=False)
    with LLM(str(smollm2_gguf), max_model_len=512, kv_cache_memory_bytes=2**26) as as_served:
        (output,) = as_served.chat(conversation, params, use_tqdm=False)
    assert output.outputs[0].text == exact.outputs[0].text == "The capital of France is Paris."
    first = output.outputs[0].token_ids[0]
    logprobs = [of.outputs[0].logprobs for of in (output, exact)]
    assert logprobs[0] is not None and logprobs[1] is not None
    assert abs(logprobs[0][0][first].logprob - logprobs[1][0][first].logprob) < 0.1


def test_it_answers_like_a_chat_model(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30)
    (output,) = llm.chat([{"role": "user", "content": CONVERSATIONS[0]}], params, use_tqdm=False)
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in output.outputs[0].text
