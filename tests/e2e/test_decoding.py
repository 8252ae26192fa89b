"""Sampling parameters on a whole engine: best_of, allowed tokens, bad words, what logprobs report, logits that are no
numbers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE, make_tiny

from octavo import LLM, SamplingParams
from octavo.frontend.generation.spec import child_seed
from octavo.protocol.errors import InvalidRequestError, RequestFailedError

PROMPT = list(range(40, 60))
NAN_TOKEN = 300


def generate(llm: LLM, prompt: list[int] = PROMPT, **fields: object):
    params = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "seed": 7, **fields})
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output


# --- best_of --------------------------------------------------------------------------------


def test_best_of_returns_the_likeliest_of_the_same_sequences(llm: LLM) -> None:
    every = generate(llm, n=5, logprobs=0, temperature=1.5)
    best = generate(llm, n=2, best_of=5, temperature=1.5)
    expected = sorted(every.outputs, key=lambda output: -output.cumulative_logprob)[:2]
    assert [output.token_ids for output in best.outputs] == [output.token_ids for output in expected]
    assert [output.cumulative_logprob for output in best.outputs] == [one.cumulative_logprob for one in expected]
    assert [(output.index, output.logprobs) for output in best.outputs] == [(0, None), (1, None)]
    assert best.num_discarded_tokens == 3 * 12
    assert len(best.timings) == 5
    with_logprobs = generate(llm, n=1, best_of=5, logprobs=2, temperature=1.5)
    assert with_logprobs.outputs[0].token_ids == expected[0].token_ids
    assert all(len(position) in (2, 3) for position in with_logprobs.outputs[0].logprobs)


def test_each_sequence_has_its_own_seed_and_the_first_the_requests(llm: LLM) -> None:
    every = generate(llm, n=3, temperature=1.0)
    alone = [generate(llm, temperature=1.0, seed=child_seed(7, index)).outputs[0] for index in range(3)]
    assert [output.token_ids for output in every.outputs] == [output.token_ids for output in alone]


# --- allowed tokens and bad words -----------------------------------------------------------


def test_only_allowed_tokens_are_generated(llm: LLM) -> None:
    for fields in ({"temperature": 0.0}, {"temperature": 2.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 40}):
        assert set(generate(llm, allowed_token_ids=[70, 71, 72], **fields).outputs[0].token_ids) <= {70, 71, 72}


def test_bad_words_are_not_generated_and_nothing_else_changes(llm: LLM) -> None:
    tokenizer = llm.client.tokenizer
    free = generate(llm, temperature=0.0).outputs[0].token_ids
    banned = tokenizer.token_string(free[3])
    words = {tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (banned, f" {banned}")}
    assert (free[3],) in words
    bad = generate(llm, temperature=0.0, bad_words=[banned]).outputs[0].token_ids
    assert bad[:3] == free[:3]
    assert free[3] not in bad
    # Of a word of two tokens only the second is ruled out, and only behind the first.
    text = tokenizer.decode(free[2:4])
    if tuple(free[2:4]) in {tuple(tokenizer.encode(word, add_special_tokens=False)) for word in (text, f" {text}")}:
        two = generate(llm, temperature=0.0, bad_words=[text]).outputs[0].token_ids
        assert two[:3] == free[:3]
        assert two[3] != free[3]


@pytest.mark.parametrize(
    "fields", [{"allowed_token_ids": [VOCAB_SIZE]}, {"allowed_token_ids": [97], "bad_words": ["^"]}]
)
def test_contradictory_token_limits_name_the_field(llm: LLM, fields: dict[str, object]) -> None:
    if "bad_words" in fields:
        fields = {"allowed_token_ids": llm.client.tokenizer.encode("^", add_special_tokens=False), "bad_words": ["^"]}
    with pytest.raises(InvalidRequestError) as caught:
        generate(llm, **fields)
    assert caught.value.param == "allowed_token_ids"


# --- logprobs -------------------------------------------------------------------------------


def test_the_whole_vocabulary_can_be_asked_for(llm: LLM, model: Path) -> None:
    output = generate(llm, temperature=0.0, max_tokens=3, logprobs=-1, prompt_logprobs=-1)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        expected = torch.log_softmax(reference(torch.tensor([PROMPT])).logits[0], -1)
    first = output.outputs[0].logprobs[0]
    assert len(first) == VOCAB_SIZE
    assert [first[token].logprob for token in range(VOCAB_SIZE)] == pytest.approx(expected[-1].tolist(), abs=1e-4)
    assert [entry.rank for token, entry in list(first.items())] == list(range(1, VOCAB_SIZE + 1))
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(PROMPT)
    for place, position in enumerate(output.prompt_logprobs[1:]):
        assert next(iter(position)) == PROMPT[place + 1]
        assert position[5].logprob == pytest.approx(float(expected[place, 5]), abs=1e-4)
    for named in ([5, 200, 0], [first_token := output.outputs[0].token_ids[0]]):
        some = generate(llm, temperature=0.0, max_tokens=3, logprob_token_ids=named).outputs[0]
        assert some.token_ids == output.outputs[0].token_ids
        for few, whole in zip(some.logprobs, output.outputs[0].logprobs, strict=True):
            assert set(few) >= {*named} and len(few) <= len(named) + 1
            assert all(entry.logprob == whole[token].logprob for token, entry in few.items())
    assert some.logprobs[0][first_token].rank == 1


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logprobs"])
def test_the_mode_of_the_engine_decides_what_is_reported(model: Path, mode: str) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = reference(torch.tensor([PROMPT])).logits[0, -1]
    processed = logits.clone()
    processed[70] += 30.0
    processed /= 0.5
    expected = {"raw_logits": logits, "processed_logprobs": torch.log_softmax(processed, -1)}[mode]
    with LLM(str(model), dtype="float32", max_model_len=256, max_logprobs=-1, logprobs_mode=mode) as llm:
        output = generate(llm, temperature=0.5, logit_bias={70: 30.0}, logprobs=-1, prompt_logprobs=0, max_tokens=2)
        first = output.outputs[0].logprobs[0]
        assert [first[token].logprob for token in range(VOCAB_SIZE)] == pytest.approx(expected.tolist(), abs=1e-3)
        best = generate(llm, n=1, best_of=3, temperature=1.5)
        every = generate(llm, n=3, temperature=1.5)
        assert best.outputs[0].token_ids in [one.token_ids for one in every.outputs]


# --- logits that are no numbers -------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[{}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}, {"cpu_kernels": "torch"}],
    ids=str,
)
def nan_llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Return an engine whose model has a token with an embedding of NaN."""
    path = make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("model"))
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][NAN_TOKEN] = torch.nan
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    with LLM(str(path), dtype="float32", max_model_len=512, block_size=8, **request.param) as llm:
        yield llm


def test_a_request_whose_logits_are_nan_fails_alone(nan_llm: LLM) -> None:
    for fields in ({"temperature": 0.0}, {"temperature": 0.5, "top_p": 0.5, "logprobs": 3}):
        fields |= {"logit_bias": {NAN_TOKEN: -100.0}}
        expected = generate(nan_llm, **fields).outputs[0].token_ids
        with pytest.raises(RequestFailedError, match="NaN or infinite"):
            generate(nan_llm, [*PROMPT, NAN_TOKEN], **fields)
        assert generate(nan_llm, **fields).outputs[0].token_ids == expected
    with pytest.raises(RequestFailedError, match="NaN or infinite"):
        generate(nan_llm, allowed_token_ids=[NAN_TOKEN], max_tokens=5)
    assert len(generate(nan_llm, allowed_token_ids=[NAN_TOKEN], max_tokens=1).outputs[0].token_ids) == 1
    stats = nan_llm.stats()
    assert stats.num_free_blocks == stats.num_blocks


def test_nan_does_not_stay_in_the_prefix_cache(nan_llm: LLM) -> None:
    """One NaN in the embeddings reaches earlier positions of its step: the blocks that another prompt shares."""
    shared = [(number * 7 + 50) % 250 for number in range(300)]
    fields = {"temperature": 0.0, "logit_bias": {NAN_TOKEN: -100.0}}
    with pytest.raises(RequestFailedError, match="NaN or infinite"):
        generate(nan_llm, [*shared, NAN_TOKEN], **fields)
    first, again = [generate(nan_llm, [*shared, 7], **fields) for _ in range(2)]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 296)
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
