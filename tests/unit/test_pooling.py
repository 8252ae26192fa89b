"""Pooling in the frontend: parameters, tokens, the window of a call, and scores. The engine is a fake."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
from fake_client import BOS, EOS, MAX_MODEL_LEN, byte_tokenizer
from pooling_fakes import EMBED, FakePooling, pooling_config
from pooling_link import vector_of
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models, pre_tokenizers, processors

from octavo.frontend.generation.prompt import TokenizedPrompt
from octavo.frontend.pooling.inputs import Fields, TextPair
from octavo.frontend.pooling.outputs import embedding_output
from octavo.frontend.pooling.result import PooledResult
from octavo.frontend.pooling.scoring import score
from octavo.frontend.pooling.spec import make_pooling_spec
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.buffers import Buffer
from octavo.protocol.errors import InvalidRequestError, OverloadedError, PromptTooLongError, RequestFailedError
from octavo.protocol.events import Failed, FailureKind, PooledOutput
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import PoolingSpec
from octavo.protocol.pooling import PoolingFacts
from octavo.protocol.pooling_params import PoolingParams

T = TypeVar("T")
CLASSIFY = PoolingFacts(convert="classify", pooling="last", num_labels=1, activation="sigmoid")
STEPS = PoolingFacts(
    convert="classify", pooling="step", token_pooling="step", num_labels=2, activation="softmax", step_tag_id=9
)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def pair_tokenizer() -> Tokenizer:
    """Return a tokenizer of letters, with the pairs of BERT."""
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2} | {chr(97 + index): 3 + index for index in range(26)}
    fast = FastTokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return Tokenizer(fast)


def letters(text: str) -> list[int]:
    return [ord(letter) - 97 + 3 for letter in text]


# --- parameters -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "params", "expected"),
    [
        (EMBED, PoolingParams(), PoolingSpec("embed", use_activation=False)),
        (EMBED, PoolingParams(use_activation=True), PoolingSpec("embed")),
        (EMBED, PoolingParams(normalize=True, dimensions=4), PoolingSpec("embed")),
        (
            EMBED,
            PoolingParams(task="token_embed"),
            PoolingSpec("token_embed", "all", False, skip_reading_prefix_cache=True),
        ),
        (
            PoolingFacts(convert="embed", pooling="mean", dimensions=(2, 3)),
            PoolingParams(dimensions=3),
            PoolingSpec("embed", "mean", dimensions=3, skip_reading_prefix_cache=True),
        ),
        (
            PoolingFacts(convert="embed", pooling="last", dimensions=(), default_dimensions=2),
            PoolingParams(skip_reading_prefix_cache=True),
            PoolingSpec("embed", dimensions=2, skip_reading_prefix_cache=True),
        ),
        (CLASSIFY, PoolingParams(use_activation=False), PoolingSpec("classify", use_activation=False)),
        (
            STEPS,
            PoolingParams(returned_token_ids=[1]),
            PoolingSpec("token_classify", "step", True, 0, 9, (1,), skip_reading_prefix_cache=True),
        ),
    ],
)
def test_specs(facts: PoolingFacts, params: PoolingParams, expected: PoolingSpec) -> None:
    assert make_pooling_spec(params, pooling_config(facts)) == expected


@pytest.mark.parametrize(
    ("facts", "params", "message"),
    [
        (None, {}, "org/fake generates text"),
        (EMBED, {"task": "classify"}, "does not compute classify: its tasks are embed, token_embed"),
        (EMBED, {"task": "score"}, "task must be one of embed, classify"),
        (EMBED, {"dimensions": 2}, "dimensions 2: the vectors of this model have 4 numbers"),
        (EMBED, {"dimensions": 0}, "dimensions must be an integer of at least 1"),
        (EMBED, {"step_tag_id": 3}, "step_tag_id needs a model with step pooling"),
        (EMBED, {"normalize": True, "use_activation": True}, "give one of them"),
        (EMBED, {"use_activation": 1}, "use_activation must be true or false"),
        (EMBED, {"truncate_prompt_tokens": 0}, "leaves no token"),
        (EMBED, {"truncate_prompt_tokens": True}, "must be an integer"),
        (EMBED, {"truncation_side": "middle"}, "must be left or right"),
        (CLASSIFY, {"dimensions": 2}, "dimensions applies to embeddings"),
        (STEPS, {"task": "classify"}, "its tasks are token_classify"),
        (STEPS, {"returned_token_ids": [2]}, "2 is not one of the 2 classes"),
        (msgspec.structs.replace(EMBED, dimensions=(2, 3)), {"dimensions": 1}, "one of 2, 3"),
        (msgspec.structs.replace(EMBED, dimensions=()), {"dimensions": 5}, "at most 4"),
    ],
)
def test_parameters_that_are_refused(facts: PoolingFacts | None, params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        make_pooling_spec(PoolingParams(**params), pooling_config(facts))


# --- tokens ---------------------------------------------------------------------------------


def submitted(fake: FakePooling, prompts: list[Any], **params: Any) -> list[list[int]]:
    run(fake.pooler.run(prompts, PoolingParams(**params)))
    return [list(submit.prompt_token_ids) for submit in fake.link.submits]


def test_prompts_of_every_form() -> None:
    prompts = ["ab", [1, 2], {"prompt": "c"}, {"prompt_token_ids": [3]}, TokenizedPrompt(None, pack_ids([4]))]
    assert submitted(FakePooling(), prompts) == [[97, 98], [1, 2], [99], [3], [4]]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["a", ""], r"input\[1\] is empty"),
        (["a", []], r"input\[1\] is empty"),
        ([[1], [1, 258]], r"input\[1\]: .*258"),
        ([[1], [1, -1]], r"input\[1\]: "),
        (["a", [1, "b"]], r"input\[1\]: a prompt must be text or a list of token ids"),
        (["a", 3], r"input\[1\]: a prompt must be text or a list"),
        (["a", {"prompt_embeds": "AAAA"}], r"input\[1\]: pooling models take no prompt_embeds"),
        (["a", "b" * (MAX_MODEL_LEN + 1)], rf"input\[1\] has {MAX_MODEL_LEN + 1} tokens, .* truncate_prompt_tokens"),
    ],
)
def test_prompts_that_are_refused(prompts: list[Any], message: str) -> None:
    fake = FakePooling()
    with pytest.raises(InvalidRequestError, match=message) as raised:
        run(fake.pooler.run(prompts, fields=Fields("input")))
    assert raised.value.param == "input"
    assert not fake.link.submits
    assert not len(fake.live)


def test_the_longest_prompt_fits() -> None:
    (token_ids,) = submitted(FakePooling(), ["a" * MAX_MODEL_LEN])
    assert len(token_ids) == MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("limit", "side", "text", "pair"),
    [
        (5, "right", "abc", "ab|cdefg"),
        (5, "left", "abc", "ab|cdefg"),
        (7, "right", "abc", "abcdef|gh"),
        (7, "left", "abc", "abcdef|gh"),
        (-1, "right", "abc", "abc|d"),
        (None, "right", "abc", "abc|d"),
    ],
)
def test_truncation_keeps_the_tokens_of_the_model(limit: int | None, side: Any, text: str, pair: str) -> None:
    """The library's own truncation is the oracle."""
    tokenizer = pair_tokenizer()
    first, second = (" ".join(part) for part in pair.split("|"))
    prompts = [" ".join(text * 2), [5] * 6, TextPair(first, second)]
    fake = FakePooling(msgspec.structs.replace(EMBED, num_segments=2), tokenizer)
    got = submitted(fake, prompts, truncate_prompt_tokens=limit, truncation_side=side)
    fast = FastTokenizer.from_str(tokenizer._fast.to_str())
    most = MAX_MODEL_LEN if limit in (None, -1) else limit
    fast.enable_truncation(most, direction=side)
    pair_encoding = fast.encode(first, second)
    assert got == [fast.encode(prompts[0]).ids, [5] * min(6, most), pair_encoding.ids]
    spec = fake.link.submits[2].params
    assert isinstance(spec, PoolingSpec)
    assert spec.segment_start == pair_encoding.type_ids.index(1)


def test_a_model_without_segments_gets_none() -> None:
    fake = FakePooling(tokenizer=pair_tokenizer())
    run(fake.pooler.run([TextPair("a b", "c")]))
    assert fake.link.submits[0].params == PoolingSpec("embed", use_activation=False)
    assert list(fake.link.submits[0].prompt_token_ids) == [1, *letters("ab"), 2, *letters("c"), 2]


def test_limits_of_the_texts_of_a_pair() -> None:
    fake = FakePooling(tokenizer=pair_tokenizer())
    assert submitted(fake, [TextPair("a b c", "d e f", (1, 2)), TextPair("a", "d", (1, 2))]) == [
        [1, *letters("a"), 2, *letters("de"), 2],
        [1, *letters("a"), 2, *letters("d"), 2],
    ]


def test_truncation_without_room() -> None:
    with pytest.raises(InvalidRequestError, match="leaves none of the text"):
        submitted(FakePooling(tokenizer=pair_tokenizer()), ["a b c"], truncate_prompt_tokens=2)
    with pytest.raises(InvalidRequestError, match="is more than the 256 tokens"):
        submitted(FakePooling(), ["a"], truncate_prompt_tokens=257)


def test_lower_case_and_the_end_of_a_text() -> None:
    facts = msgspec.structs.replace(EMBED, lowers_case=True, appends_eos=True)
    assert submitted(FakePooling(facts), ["aBc", "defg"], truncate_prompt_tokens=4) == [
        [97, 98, 99, EOS],
        [100, 101, 102, EOS],
    ]


# --- calls ----------------------------------------------------------------------------------


def test_results_are_in_the_order_of_the_prompts() -> None:
    fake = FakePooling()
    fake.link.gate = asyncio.Event()
    progress: list[int] = []

    async def main() -> list[PooledResult]:
        task = asyncio.create_task(fake.pooler.run([[index] for index in range(100)], on_progress=progress.append))
        while len(fake.link.submits) < 100:
            await asyncio.sleep(0)
        assert len(fake.live) == 1
        fake.link.answer_all()
        return await task

    results = run(main())
    assert [one.array().tolist() for one in results] == [vector_of([index]) for index in range(100)]
    assert sum(progress) == 100
    assert not len(fake.live)
    output = embedding_output(results[3])
    assert (output.outputs.embedding, output.outputs.hidden_size) == (vector_of([3]), 4)
    assert (output.prompt_token_ids, output.num_cached_tokens, output.finished) == ([3], 1, True)


def test_a_call_has_a_window() -> None:
    fake = FakePooling()
    results = run(fake.pooler.run([[index % 250] for index in range(1000)], window=64))
    assert [one.array()[2] for one in results] == [index % 250 for index in range(1000)]
    assert 32 <= fake.link.most_in_flight <= 64


def test_parameters_of_each_prompt() -> None:
    fake = FakePooling(msgspec.structs.replace(EMBED, dimensions=()))
    short, long = PoolingParams(dimensions=1), PoolingParams(dimensions=3)
    results = run(fake.pooler.run([[1], [2], [3]], [short, long, long]))
    assert [one.array().shape for one in results] == [(1,), (3,), (3,)]


def test_a_rejected_prompt_ends_the_call_and_leaves_nothing() -> None:
    fake = FakePooling()
    fake.link.gate = asyncio.Event()
    fake.link.failures[7] = Failed("", FailureKind.OVERLOADED, "full", "max_num_queued_reqs")

    async def main() -> None:
        task = asyncio.create_task(fake.pooler.run([[1]] * 20))
        while len(fake.link.submits) < 20:
            await asyncio.sleep(0)
        fake.link._answer(fake.link.submits[7], 7)
        with pytest.raises(OverloadedError, match="full"):
            await task

    run(main())
    assert len(fake.link.aborted) == 19
    assert not len(fake.live)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_an_aborted_call_leaves_nothing(is_cancelled: bool) -> None:
    fake = FakePooling()
    fake.link.gate = asyncio.Event()

    async def main() -> None:
        task = asyncio.create_task(fake.pooler.run([[1]] * 40, request_id="mine"))
        while len(fake.link.submits) < 40:
            await asyncio.sleep(0)
        if is_cancelled:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            assert fake.live.abort("mine")
            with pytest.raises(RequestFailedError, match="mine was aborted"):
                await task

    run(main())
    assert len(fake.link.aborted) == 40
    assert not len(fake.live)


def test_bfloat16_results_become_float32() -> None:
    bits = np.array([1.0, -2.5, 0.15625], "<f4").view("<u4") >> 16
    data = Buffer(bits.astype("<u2").tobytes())
    result = PooledResult("r", pack_ids([1]), PooledOutput(data, (3,), "bfloat16"))
    assert result.array().tolist() == [1.0, -2.5, 0.15625]


# --- scores ---------------------------------------------------------------------------------


def scores(fake: FakePooling, first: list[str], second: list[str], **options: Any) -> list[float]:
    return [one.outputs.score for one in run(score(fake.pooler, first, second, **options))]


def test_a_cross_encoder_reads_pairs() -> None:
    fake = FakePooling(CLASSIFY, pair_tokenizer())
    assert scores(fake, ["a b"], ["c", "d e"]) == [6.0, 7.0]
    assert [list(submit.prompt_token_ids) for submit in fake.link.submits] == [
        [1, *letters("ab"), 2, *letters("c"), 2],
        [1, *letters("ab"), 2, *letters("de"), 2],
    ]


def test_a_score_template_comes_before_the_form_of_pairs() -> None:
    template = "{% for message in messages %}{{ message.role[0] }}{{ message.content }}{% endfor %}{{ instruction }}"
    fake = FakePooling(CLASSIFY, byte_tokenizer(), chat_template=template)
    scores(fake, ["abc"], ["de"], template_variables={"instruction": "!"}, max_tokens=(2, 0))
    assert bytes(list(fake.link.submits[0].prompt_token_ids)) == b"qabdde!"
    scores(fake, ["a"], ["b"], template_variables={"add_generation_prompt": True})
    with pytest.raises(InvalidRequestError, match="must not hold 'messages'"):
        scores(fake, ["a"], ["b"], template_variables={"messages": []})
    with pytest.raises(InvalidRequestError, match="need a score template"):
        scores(FakePooling(CLASSIFY), ["a"], ["b"], template_variables={"instruction": "!"})


def cosine(one: list[int], other: list[int]) -> float:
    first, second = np.array(vector_of(one)), np.array(vector_of(other))
    return float(first @ second / np.linalg.norm(first) / np.linalg.norm(second))


def test_vectors_are_compared_and_a_query_is_computed_once() -> None:
    fake = FakePooling()
    got = scores(fake, ["ab"], ["c", "ab"])
    assert got == pytest.approx([cosine([97, 98], [99]), 1.0])
    assert len(fake.link.submits) == 3
    assert scores(FakePooling(), ["a", "b"], ["c", "b"]) == pytest.approx([cosine([97], [99]), 1.0])


def test_late_interaction() -> None:
    fake = FakePooling(msgspec.structs.replace(EMBED, task="token_embed"))
    (got,) = scores(fake, ["ab"], ["cd"])
    rows = [[np.array(vector_of([ord(letter)])) for letter in text] for text in ("ab", "cd")]
    assert got == pytest.approx(sum(max(float(one @ other) for other in rows[1]) for one in rows[0]))


@pytest.mark.parametrize(
    ("facts", "first", "second", "message"),
    [
        (EMBED, [], ["a"], "queries is empty"),
        (EMBED, ["a"], [], "documents is empty"),
        (EMBED, ["a", "b"], ["a"], "queries has 2 texts and documents has 1"),
        (EMBED, ["a"], ["a", ""], r"documents\[1\] is empty"),
        (None, ["a"], ["b"], "generates text"),
        (msgspec.structs.replace(CLASSIFY, num_labels=3), ["a"], ["b"], "has 3 classes"),
        (STEPS, ["a"], ["b"], "computes token_classify, no scores"),
    ],
)
def test_scores_that_are_refused(facts: PoolingFacts | None, first: list[str], second: list[str], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        scores(FakePooling(facts), first, second, names=("queries", "documents"))


def test_too_long_is_named_as_such() -> None:
    with pytest.raises(PromptTooLongError):
        scores(FakePooling(), ["a"], ["b" * 300])


def test_bos_is_left_out_on_request() -> None:
    fast = byte_tokenizer()._fast
    fast.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    for is_added in (True, False):
        fake = FakePooling(tokenizer=Tokenizer(fast))
        run(fake.pooler.run(["a"], add_special_tokens=is_added))
        assert list(fake.link.submits[0].prompt_token_ids) == [BOS, 97][not is_added :]
