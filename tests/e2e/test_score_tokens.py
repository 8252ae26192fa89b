"""`score_tokens`: the logprobs that sampling gave, bit for bit, whatever has happened since."""

import asyncio
import base64
import io
import math
import os
import random
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from servers import Server
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


def test_named_tokens_of_a_prompt(model: Path) -> None:
    """Their logprobs have the bits of `prompt_logprobs` -1, in chunks, beside others and by either kernels."""
    rng = random.Random(6)
    prompt = prompts()[5]
    rows = [rng.sample(range(VOCAB_SIZE), k=rng.randrange(4)) for _ in prompt[4:]]
    rows[0], rows[-1] = [], [prompt[-1], -1, 7]
    named = {"prompt_logprob_token_ids": rows, "prompt_logprob_start": 3}
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    for kernels in ("native", "torch"):
        with LLM(str(model), **SETTINGS, cpu_kernels=kernels, max_logprobs=-1) as llm:
            several = [
                params.clone(prompt_logprobs=-1),
                params.clone(**named),
                params.clone(**named, prompt_logprobs=1),
            ]
            whole, alone, both = llm.generate([prompt] * 3, several, use_tqdm=False)
        assert whole.prompt_logprobs and both.prompt_logprobs
        expected = [
            [-math.inf if token == -1 else whole.prompt_logprobs[4 + place][token].logprob for token in row]
            + [-math.inf] * (3 - len(row))
            for place, row in enumerate(rows)
        ]
        assert alone.prompt_token_id_logprobs == both.prompt_token_id_logprobs == expected
        assert (alone.prompt_logprobs, whole.prompt_token_id_logprobs) == (None, None)
        for position, each, token in zip(both.prompt_logprobs[1:], whole.prompt_logprobs[1:], prompt[1:], strict=True):
            assert len(position) <= 2 and position[token] == each[token]
        assert alone.outputs[0].token_ids == whole.outputs[0].token_ids


def test_named_tokens_over_http(server: Server) -> None:
    rows = [[5], [6, 7], [-1]]
    sampling = {"max_tokens": 1, "prompt_logprobs": 0, "prompt_logprob_token_ids": rows, "prompt_logprob_start": 1}
    body = {"token_ids": [3, 4, 5, 6, 7], "sampling_params": sampling}
    answer = server.post("/inference/v1/generate", body).json()
    scores = np.load(io.BytesIO(base64.b64decode(answer["prompt_token_id_logprobs"])))
    assert (scores.shape, scores.dtype) == ((3, 2), np.float32)
    known = [answer["prompt_logprobs"][place][str(token)]["logprob"] for place, token in ((2, 5), (3, 6))]
    assert scores[:2, 0].tolist() == known
    assert np.isneginf(scores[2]).all() and np.isneginf(scores[0, 1]) and np.isfinite(scores[1, 1])
    sampling["prompt_logprob_token_ids"] = rows[:2]
    refused = server.post("/inference/v1/generate", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (
        400,
        "sampling_params.prompt_logprob_token_ids",
    )
    assert "3 scored rows" in refused.text
    elsewhere = server.post("/v1/completions", {"prompt": [3, 4], "prompt_logprob_token_ids": [[5]]})
    assert elsewhere.status_code == 400 and "/inference/v1/generate" in elsewhere.text


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
