"""`score_tokens`: the logprobs that sampling gave, bit for bit, whatever has happened since."""

import asyncio
import os
import random
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import VOCAB_SIZE
from waiting import until

from octavo import LLM, AsyncClient, SamplingParams
from octavo.frontend.generation.scoring import score_tokens
from octavo.frontend.outputs import RequestOutput
from octavo.protocol import restarts
from octavo.protocol.errors import InvalidRequestError

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 6, "max_num_batched_tokens": 40}
PARAMS = SamplingParams(temperature=1.1, max_tokens=60, ignore_eos=True, logprobs=0)


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [rng.choices(range(3, VOCAB_SIZE), k=length) for length in (1, 7, 40, 68, 3, 50)]


def sampled(output: RequestOutput) -> list[float]:
    """The logprobs with which the tokens of an output were drawn."""
    (one,) = output.outputs
    assert one.logprobs is not None
    return [row[token].logprob for row, token in zip(one.logprobs, one.token_ids, strict=True)]


def test_the_bits_of_sampling(model: Path) -> None:
    """Beside others and alone; the fourth request has filled the length of the model."""
    with LLM(str(model), **SETTINGS) as llm:
        params = [PARAMS.clone(seed=seed, repetition_penalty=1.0 + seed / 10) for seed in range(6)]
        outputs = llm.generate(prompts(), params, use_tqdm=False)
        tokens = [output.outputs[0].token_ids for output in outputs]
        assert len(prompts()[3]) + len(tokens[3]) == SETTINGS["max_model_len"]
        together = llm.score_tokens(prompts(), tokens)
        assert together == [sampled(output) for output in outputs]
        for prompt, each, expected in zip(prompts(), tokens, together, strict=True):
            assert llm.score_tokens(prompt, each) == expected
            assert llm.score_tokens(prompt, each[:1]) == expected[:1]
        assert llm.score_tokens([5], []) == []
        (text,) = llm.generate("a text", PARAMS.clone(seed=1), use_tqdm=False)
        assert llm.score_tokens("a text", text.outputs[0].token_ids) == sampled(text)
        with pytest.raises(InvalidRequestError, match="vocabulary"):
            llm.score_tokens([5], [10**6])
        with pytest.raises(InvalidRequestError, match="max_model_len"):
            llm.score_tokens([5] * 100, [6] * 29)
    with LLM(str(model), **{**SETTINGS, "max_num_batched_tokens": 16, "block_size": 32}) as other:
        assert other.score_tokens(prompts(), tokens) == together


def test_other_logprobs_are_not_scored() -> None:
    client: Any = SimpleNamespace(config=SimpleNamespace(logprobs_mode="processed_logprobs"))
    with pytest.raises(InvalidRequestError, match="--logprobs-mode raw_logprobs"):
        asyncio.run(score_tokens(client, [5], [6], priority=0, cache_salt=None))


def test_a_restart_changes_no_bit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)

    async def main() -> None:
        async with await AsyncClient.launch(str(model), **SETTINGS) as client:
            finals = []
            for seed, prompt in enumerate(prompts()):
                outputs = [one async for one in client.generate(prompt, PARAMS.clone(seed=seed))]
                parts = [part.outputs[0] for part in outputs]
                tokens = [token for part in parts for token in part.token_ids]
                rows = [row for part in parts for row in part.logprobs or []]
                finals.append((prompt, tokens, [row[t].logprob for row, t in zip(rows, tokens, strict=True)]))
            scoring = asyncio.gather(*(client.score_tokens(prompt, tokens) for prompt, tokens, _ in finals))
            await asyncio.sleep(0)
            assert client.engine is not None
            os.kill(client.engine.core_pid, signal.SIGKILL)
            assert await scoring == [expected for _, _, expected in finals]
            await until(lambda: client.health().ok)
            prompt, tokens, expected = finals[2]
            assert await client.score_tokens(prompt, tokens) == expected

    asyncio.run(main())
