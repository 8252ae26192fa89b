"""KV blocks move from a prefill engine to a decode engine: the same bits, whatever happens on the way."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams

PROMPT = [number % 90 + 1 for number in range(100)]
SETTINGS: dict[str, Any] = {"max_model_len": 192, "num_gpu_blocks_override": 40, "max_num_seqs": 4}


def transfer(role: str, **fields: Any) -> dict[str, Any]:
    return {"kv_transfer_config": {"kv_connector": "OctavoConnector", "kv_role": role, **fields}}


def prefill(llm: LLM, prompt: list[int]) -> dict[str, Any]:
    """Compute a prompt, and return how another engine goes on."""
    params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert output.kv_transfer_params is not None
    return output.kv_transfer_params


def decode(llm: LLM, prompt: list[int], kv_transfer_params: dict[str, Any] | None) -> tuple[Any, int]:
    """Return tokens and logprobs of a continuation, and how much of the prompt was not computed for it."""
    extra_args = {"kv_transfer_params": kv_transfer_params} if kv_transfer_params else None
    params = SamplingParams(max_tokens=16, seed=5, temperature=1.0, ignore_eos=True, logprobs=2, extra_args=extra_args)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    (answer,) = output.outputs
    assert answer.logprobs is not None
    logprobs = [{token: logprob.logprob for token, logprob in position.items()} for position in answer.logprobs]
    return (answer.token_ids, logprobs), output.num_cached_tokens


@pytest.fixture(scope="module")
def engines(model: Path) -> Iterator[tuple[LLM, LLM]]:
    """Return an engine that gives blocks and one that takes them."""
    with ExitStack() as stack:
        roles = ("kv_producer", "kv_consumer")
        first, second = (
            stack.enter_context(LLM(str(model), dtype="float32", **SETTINGS, **transfer(role))) for role in roles
        )
        yield first, second


def test_a_decode_engine_continues_with_the_bits_of_one_that_computes(engines: tuple[LLM, LLM]) -> None:
    giver, taker = engines
    expected, num_cached = decode(taker, PROMPT, None)
    assert num_cached == 0
    taker.reset_prefix_cache()
    params = prefill(giver, PROMPT)
    assert params["remote_num_tokens"] == 96
    moved, num_cached = decode(taker, PROMPT, params)
    assert (moved, num_cached) == (expected, 96)
    taker.reset_prefix_cache()
    again, num_cached = decode(taker, PROMPT, params)
    assert (again, num_cached) == (expected, 0), "blocks are given once, and computed where they do not come"
