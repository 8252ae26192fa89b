"""Beam search on a whole engine: the beams and scores of transformers, and searches that are aborted."""

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pairwise import pairwise_first
from tiny_models import VOCAB_SIZE, make_tiny
from waiting import until

from octavo import LLM, AsyncClient, BeamSearchParams
from octavo.frontend.outputs import BeamSearchSequence, RequestOutput
from octavo.protocol.errors import InvalidRequestError, PromptTooLongError

EOS_TOKEN_IDS = [2, *range(30, VOCAB_SIZE, 16)]
"""So many that beams of a random model end at all lengths."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("model"))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_IDS}))
    return path


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), dtype="float32", max_model_len=256) as llm:
        yield llm


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


def beams_of_transformers(
    reference: Any, tokens: list[int], width: int, **options: Any
) -> list[tuple[list[int], float]]:
    """Return the new tokens and the score of each beam."""
    eos = options.pop("eos_token_id", EOS_TOKEN_IDS)
    done = reference.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones((1, len(tokens)), dtype=torch.int64),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        eos_token_id=eos,
        pad_token_id=VOCAB_SIZE + 1,
        **options,
    )
    return [
        ([token for token in sequence[len(tokens) :] if token <= VOCAB_SIZE], score)
        for sequence, score in zip(done.sequences.tolist(), done.sequences_scores.tolist(), strict=True)
    ]


def scores_of(found: list[BeamSearchSequence], num_prompt_tokens: int, length_penalty: float) -> list[float]:
    return [one.cum_logprob / (len(one.tokens) - num_prompt_tokens) ** length_penalty for one in found]


@pytest.mark.parametrize(
    ("width", "early_stopping", "length_penalty"),
    pairwise_first([2, 3, 8], [True, False, "never"], [1.0, 0.0, 2.5, -1.0]),
)
def test_beams_and_scores_are_those_of_transformers(
    llm: LLM, reference: Any, width: int, early_stopping: bool | str, length_penalty: float
) -> None:
    prompts = [prompt(1), prompt(37, 1), prompt(70, 2)]
    options: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=width, max_tokens=18, **options))
    for tokens, output in zip(prompts, outputs, strict=True):
        expected = beams_of_transformers(reference, tokens, width, max_new_tokens=18, **options)
        found = output.sequences
        assert [one.tokens[len(tokens) :] for one in found] == [token_ids for token_ids, _ in expected]
        got = scores_of(found, len(tokens), length_penalty)
        assert got == pytest.approx([score for _, score in expected], rel=1e-4, abs=1e-5)


def test_without_an_end_all_beams_are_of_the_same_length(llm: LLM, reference: Any) -> None:
    tokens = prompt(20, 3)
    (output,) = llm.beam_search([tokens], BeamSearchParams(beam_width=4, max_tokens=9, ignore_eos=True))
    expected = beams_of_transformers(reference, tokens, 4, max_new_tokens=9, eos_token_id=None)
    assert [one.tokens[20:] for one in output.sequences] == [token_ids for token_ids, _ in expected]
    assert {one.finish_reason for one in output.sequences} == {"length"}


def test_logprobs_texts_and_reasons_belong_to_their_tokens(llm: LLM) -> None:
    tokens = prompt(12, 4)
    params = BeamSearchParams(beam_width=3, max_tokens=12)
    (output,) = llm.beam_search([tokens], params)
    decode = llm.client.tokenizer.decode
    for one in output.sequences:
        new = one.tokens[12:]
        assert one.tokens[:12] == tokens
        assert [next(iter(position)) for position in one.logprobs] == new
        assert sum(position[token].logprob for position, token in zip(one.logprobs, new, strict=True)) == pytest.approx(
            one.cum_logprob
        )
        assert one.finish_reason == ("stop" if new[-1] in EOS_TOKEN_IDS else "length")
        shown = new[:-1] if one.finish_reason == "stop" else new
        assert one.text.endswith(decode(shown).lstrip("\ufffd")), "a prompt may end inside a character"
    (whole,) = llm.beam_search([tokens], BeamSearchParams(beam_width=3, max_tokens=12, include_stop_str_in_output=True))
    assert [one.tokens for one in whole.sequences] == [one.tokens for one in output.sequences]
    assert any(len(one.text) > len(other.text) for one, other in zip(whole.sequences, output.sequences, strict=True))


def test_a_temperature_changes_the_scores(llm: LLM, reference: Any) -> None:
    tokens = prompt(15, 5)
    params = BeamSearchParams(beam_width=2, max_tokens=1, temperature=0.5, ignore_eos=True)
    (output,) = llm.beam_search([tokens], params)
    with torch.no_grad():
        expected = torch.log_softmax(reference(torch.tensor([tokens])).logits[0, -1] / 0.5, -1).topk(2)
    assert [one.tokens[-1] for one in output.sequences] == expected.indices.tolist()
    assert [one.cum_logprob for one in output.sequences] == pytest.approx(expected.values.tolist(), abs=1e-4)


def test_what_does_not_fit_is_rejected(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError) as caught:
        llm.beam_search([prompt(200)], BeamSearchParams(beam_width=2, max_tokens=57))
    assert caught.value.param == "max_tokens"
    (output,) = llm.beam_search([prompt(200)], BeamSearchParams(beam_width=2, max_tokens=56, ignore_eos=True))
    assert len(output.sequences[0].tokens) == 256
    with pytest.raises(InvalidRequestError, match="concurrency_limit"):
        llm.beam_search([[1]], BeamSearchParams(beam_width=2, max_tokens=2), concurrency_limit=0)


def test_the_engine_is_left_empty_however_a_search_ends(model: Path) -> None:
    async def main() -> None:
        async with AsyncClient.launch(str(model), dtype="float32", max_model_len=512) as client:
            params = BeamSearchParams(beam_width=4, max_tokens=400, ignore_eos=True)

            async def has_begun() -> bool:
                return bool((await client.engine_stats()).generation_tokens)

            async def start() -> "asyncio.Task[RequestOutput]":
                task = asyncio.create_task(client.beam_search(prompt(9), params, request_id="search"))
                await until(has_begun)
                return task

            task = await start()
            assert await client.abort("search")
            output = await task
            assert [one.finish_reason for one in output.outputs] == ["abort"] * 4
            lengths = {len(one.token_ids) for one in output.outputs}
            assert len(lengths) == 1
            assert 0 < lengths.pop() < 400
            task = await start()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert client.num_live_requests == 0
            stats = await client.engine_stats()
            while stats.num_running or stats.num_waiting:
                stats = await client.engine_stats()
            assert stats.num_free_blocks == stats.num_blocks

    asyncio.run(main())


def test_an_accepted_beam_search_continues_with_a_full_queue(model: Path, llm: LLM) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=5)
    (expected,) = llm.beam_search([prompt(9)], params)
    with LLM(str(model), dtype="float32", max_model_len=256, max_num_queued_reqs=1, max_num_seqs=1) as narrow:
        (found,) = narrow.beam_search([prompt(9)], params)
    assert [one.tokens for one in found.sequences] == [one.tokens for one in expected.sequences]
