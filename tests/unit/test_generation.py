"""From parameters to the engine's spec, and from token events to text, stop strings and logprobs."""

import asyncio
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import small_tokenizers
from generations import generation_on, outputs_of
from hypothesis import given
from hypothesis import strategies as st
from specs import some_config
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from octavo.frontend.generation.best_of import choose_best
from octavo.frontend.generation.limits import check_cache_salt
from octavo.frontend.generation.sequence import Sequence
from octavo.frontend.generation.spec import child_seed, make_spec, output_kind, request_seed
from octavo.frontend.outputs import CompletionOutput
from octavo.frontend.request_stream import RequestStream
from octavo.frontend.text.detokenizer import Detokenizer
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.code import ProcessorSource
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import InvalidRequestError, PromptTooLongError
from octavo.protocol.events import Finished, FinishReason, TokenLogprobs, Tokens
from octavo.protocol.params import OutputKind, SamplingParams, SamplingSpec
from octavo.protocol.requests import Submit

CONFIG = some_config()


def spec_of(params: SamplingParams, num_prompt_tokens: int = 4, config: ResolvedConfig = CONFIG) -> SamplingSpec:
    return make_spec(
        params,
        num_prompt_tokens=num_prompt_tokens,
        max_model_len=32,
        seed=1,
        config=config,
        tokenizer=small_tokenizers.byte_level(),
    )


# --- the spec -------------------------------------------------------------------------------


def test_nothing_is_left_open() -> None:
    spec = spec_of(SamplingParams(max_tokens=None, logprobs=2, stop_token_ids=[5], logit_bias={7: 200.0}))
    assert (spec.max_tokens, spec.logprobs, spec.eos_token_ids, spec.stop_token_ids) == (28, 2, (2,), (5,))
    assert spec.logit_bias == ((7, 100.0),), "biases are clamped"
    assert not spec.skip_reading_prefix_cache


def test_greedy_drops_the_filters_and_tiny_temperatures_are_raised() -> None:
    greedy = spec_of(SamplingParams(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1))
    assert (greedy.temperature, greedy.top_k, greedy.top_p, greedy.min_p) == (0.0, 0, 1.0, 0.0)
    assert spec_of(SamplingParams(temperature=0.001)).temperature == 0.01


def test_arguments_need_a_logits_processor() -> None:
    params = SamplingParams(extra_args={"target_token": 5})
    with pytest.raises(InvalidRequestError, match="--logits-processors") as caught:
        spec_of(params)
    assert caught.value.param == "extra_args"
    config = msgspec.structs.replace(CONFIG, logits_processors=[ProcessorSource("mine:Processor")])
    assert spec_of(params, config=config).extra_args == {"target_token": 5}
    assert spec_of(SamplingParams(extra_args={})).extra_args is None


def test_every_number_has_a_place_in_a_message() -> None:
    params = SamplingParams(
        temperature=np.float64(0.5), top_p=np.float64(0.9), top_k=2**70, max_tokens=None, min_tokens=2**70
    )
    spec = spec_of(params)
    assert (spec.temperature, spec.top_p, spec.min_tokens) == (0.5, 0.9, spec.max_tokens)
    assert spec.top_k == some_config().model.vocab_size
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=SamplingSpec) == spec


@pytest.mark.parametrize("salt", [5, b"salt", "\ud800"])
def test_a_salt_is_text(salt: object) -> None:
    check_cache_salt(None)
    check_cache_salt("tenant é")
    with pytest.raises(InvalidRequestError) as caught:
        check_cache_salt(salt)
    assert caught.value.param == "cache_salt"


def test_any_request_id_has_a_seed() -> None:
    assert request_seed(0, "\ud800") != request_seed(0, "\ud801")


def test_ignore_eos_and_prompt_logprobs() -> None:
    spec = spec_of(SamplingParams(ignore_eos=True, prompt_logprobs=1))
    assert spec.eos_token_ids == ()
    assert spec.skip_reading_prefix_cache, "cached positions have no logits"


def test_a_prompt_that_cannot_fit_is_rejected() -> None:
    with pytest.raises(PromptTooLongError, match="at most 28"):
        spec_of(SamplingParams(max_tokens=29))
    with pytest.raises(PromptTooLongError, match="shorten the prompt"):
        spec_of(SamplingParams(), num_prompt_tokens=32)
    with pytest.raises(InvalidRequestError, match="empty"):
        spec_of(SamplingParams(), num_prompt_tokens=0)


def test_the_whole_vocabulary_needs_permission() -> None:
    with pytest.raises(InvalidRequestError, match="--max-logprobs"):
        spec_of(SamplingParams(logprobs=-1))
    unlimited = some_config(max_logprobs=-1)
    spec = spec_of(SamplingParams(logprobs=-1), config=unlimited)
    assert spec.logprobs == unlimited.model.vocab_size


def test_seeds() -> None:
    assert request_seed(0, "a") == request_seed(0, "a")
    assert len({request_seed(0, "a"), request_seed(1, "a"), request_seed(0, "b")}) == 3
    assert child_seed(5, 0) == 5
    assert child_seed(-1, 0) == 2**64 - 1
    assert len({child_seed(5, index) for index in range(100)}) == 100
    assert all(0 <= child_seed(-(2**63), index) < 2**64 for index in range(100))


def test_bad_words_are_the_tokens_at_the_start_and_after_a_space() -> None:
    config = some_config()
    spec = spec_of(SamplingParams(bad_words=["b", " the "]), config=config)
    assert spec.bad_words == ((98,), (32, 98)), "words with ids outside the model's vocabulary cannot be generated"


def test_allowed_tokens_are_sorted_and_checked() -> None:
    assert spec_of(SamplingParams(allowed_token_ids=[9, 3, 9])).allowed_token_ids == (3, 9)
    with pytest.raises(InvalidRequestError, match="out of vocabulary") as caught:
        spec_of(SamplingParams(allowed_token_ids=[3, 100]))
    assert caught.value.param == "allowed_token_ids"
    with pytest.raises(InvalidRequestError, match="token ids 100, 200 are out of vocabulary"):
        spec_of(SamplingParams(logit_bias={3: 1.0, 100: 1.0, 200: 1.0}))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(allowed_token_ids=[98], bad_words=["b"]),
        SamplingParams(allowed_token_ids=[2, 5], stop_token_ids=[5], min_tokens=1),
    ],
)
def test_a_request_that_may_generate_nothing_is_rejected(params: SamplingParams) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        spec_of(params)
    assert caught.value.param == "allowed_token_ids"


def test_best_of_needs_logprobs_that_nobody_sees() -> None:
    processed = some_config(logprobs_mode="processed_logits")
    spec = spec_of(SamplingParams(n=1, best_of=3), config=processed)
    assert (spec.logprobs, spec.logprobs_mode) == (0, "raw_logprobs")
    assert spec_of(SamplingParams(n=3, best_of=3)).logprobs is None
    assert spec_of(SamplingParams(logprobs=2), config=processed).logprobs_mode == "processed_logits"
    with pytest.raises(InvalidRequestError, match="reports logits") as caught:
        spec_of(SamplingParams(n=1, best_of=3, logprobs=1), config=processed)
    assert caught.value.param == "best_of"


def test_best_of_is_not_streamed() -> None:
    assert output_kind(SamplingParams(n=2, best_of=2), OutputKind.DELTA) is OutputKind.DELTA
    assert output_kind(SamplingParams(n=2, best_of=3), OutputKind.DELTA) is OutputKind.FINAL_ONLY
    for kind in (OutputKind.DELTA, OutputKind.CUMULATIVE):
        with pytest.raises(InvalidRequestError, match="known at the end") as caught:
            output_kind(SamplingParams(n=2, best_of=3, output_kind=kind), OutputKind.DELTA)
        assert caught.value.param == "best_of"


def test_the_best_are_returned_first() -> None:
    outputs = [
        CompletionOutput(i, "", [0] * (i + 1), logprob, []) for i, logprob in enumerate([-5.0, -2.0, -7.0, -2.0])
    ]
    best, num_discarded = choose_best(outputs, SamplingParams(n=3, best_of=4))
    assert [(output.index, len(output.token_ids)) for output in best] == [(0, 2), (1, 4), (2, 1)]
    assert best[0].logprobs is None
    assert num_discarded == 3
    best, _ = choose_best(outputs, SamplingParams(n=3, best_of=4, logprobs=0))
    assert best[0].logprobs == []


# --- the sequence ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per byte: id = byte, and 256 = <eos>."""
    characters = pre_tokenizers.ByteLevel.alphabet()
    path: Path = tmp_path_factory.mktemp("tokenizer")
    by_byte = {_byte(character): character for character in characters}
    vocab = {by_byte[byte]: byte for byte in range(256)}
    fast = FastTokenizer(models.BPE(vocab, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<eos>"])
    fast.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return Tokenizer.load(path)


def _byte(character: str) -> int:
    """Inverse of GPT-2's byte alphabet: printable bytes stand for themselves, the rest from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return ord(character) if ord(character) < 256 else others[ord(character) - 256]


def sequence_of(tokenizer: Tokenizer, params: SamplingParams) -> Sequence:
    return Sequence(0, tokenizer, [65], params, spec_of(params))


def tokens_of(text: str) -> list[int]:
    return list(text.encode())


def test_text_grows_with_the_tokens(tokenizer: Tokenizer) -> None:
    sequence = sequence_of(tokenizer, SamplingParams(max_tokens=20))
    assert not sequence.update([Tokens("r", tokens_of("héllo")), Tokens("r", tokens_of(" you"))])
    fresh = sequence.take_fresh()
    assert (fresh.text, fresh.token_ids, fresh.finish_reason) == ("héllo you", tokens_of("héllo you"), None)
    sequence.update([Tokens("r", tokens_of("!")), Finished("r", FinishReason.LENGTH, num_preemptions=2)])
    assert (sequence.take_fresh().text, sequence.snapshot().text) == ("!", "héllo you!")
    assert (sequence.snapshot().finish_reason, sequence.num_preemptions) == ("length", 2)


def test_the_eos_token_is_counted_but_not_shown(tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=20, stop_token_ids=[65], skip_special_tokens=False)
    sequence = sequence_of(tokenizer, params)
    sequence.update([Tokens("r", [66, 65]), Finished("r", FinishReason.STOP, stop_token_id=65)])
    done = sequence.snapshot()
    assert (done.text, done.token_ids, done.stop_reason) == ("B", [66, 65], 65)
    shown = sequence_of(tokenizer, params.clone(include_stop_str_in_output=True))
    shown.update([Tokens("r", [66, 65]), Finished("r", FinishReason.STOP, stop_token_id=65)])
    assert shown.snapshot().text == "BA"


@given(st.data())
def test_a_stop_string_ends_the_sequence_wherever_it_is_cut(tokenizer: Tokenizer, data: st.DataObject) -> None:
    before = data.draw(st.text("abcENDé", max_size=12))
    text = before + "END" + "more"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens_of(text))), max_size=5)))
    sequence = sequence_of(tokenizer, SamplingParams(max_tokens=28, stop=["END"]))
    tokens, start, shown, stopped = tokens_of(text), 0, "", False
    for end in [*cuts, len(tokens)]:
        if not stopped:
            stopped = sequence.update([Tokens("r", tokens[start:end])])
            shown += sequence.take_fresh().text
        start = end
    expected = text[: text.index("END")]
    assert stopped
    assert shown == sequence.snapshot().text == expected
    assert sequence.snapshot().token_ids == tokens_of(expected + "END")
    assert (sequence.finish_reason, sequence.stop_reason) == ("stop", "END")


TOKENIZERS = [small_tokenizers.byte_level(), small_tokenizers.sentencepiece()]


@pytest.mark.parametrize("own", TOKENIZERS, ids=["byte-level", "sentencepiece"])
@given(st.data())
def test_a_stream_shows_what_the_whole_shows_and_nothing_of_a_stop_string(own: Tokenizer, data: st.DataObject) -> None:
    """Any tokens, any stop strings, any portions, with and without special tokens."""
    ids = data.draw(st.lists(st.integers(0, own.vocab_size - 1), min_size=1, max_size=20))
    skips = data.draw(st.booleans())
    whole = Detokenizer(own, [own.vocab_size], skip_special_tokens=skips)
    text = whole.push(ids) + whole.finish()
    spans = st.tuples(st.integers(0, len(text)), st.integers(1, 4)).map(lambda span: text[span[0] : sum(span)])
    stops = data.draw(st.lists(spans.filter(bool) | st.text(" theain", min_size=1, max_size=3), min_size=1, max_size=3))
    params = SamplingParams(
        max_tokens=28,
        stop=stops,
        ignore_eos=True,
        skip_special_tokens=skips,
        include_stop_str_in_output=data.draw(st.booleans()),
    )
    sequence = Sequence(0, own, [own.vocab_size], params, spec_of(params))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    shown, start = "", 0
    for end in [*cuts, len(ids)]:
        if sequence.update([Tokens("r", ids[start:end])]):
            break
        shown += sequence.take_fresh().text
        assert sequence.snapshot().text == shown
        start = end
    else:
        sequence.update([Finished("r", FinishReason.LENGTH)])
    shown += sequence.take_fresh().text
    ends = [(text.index(stop) + len(stop), stop) for stop in stops if stop in text]
    expected = text
    if ends:
        end, stop = min(ends, key=lambda one: (one[0], stops.index(one[1])))
        expected = text[:end] if params.include_stop_str_in_output else text[: end - len(stop)]
    assert shown == sequence.snapshot().text == expected
    assert sequence.stop_reason == (stop if ends else None)


def test_min_tokens_delays_stop_strings(tokenizer: Tokenizer) -> None:
    sequence = sequence_of(tokenizer, SamplingParams(max_tokens=20, min_tokens=4, stop=["X"]))
    assert sequence.update([Tokens("r", tokens_of("aXbXc"))])
    assert sequence.snapshot().text == "aXb"


def test_held_back_text_is_released_at_the_end(tokenizer: Tokenizer) -> None:
    sequence = sequence_of(tokenizer, SamplingParams(max_tokens=20, stop=["STOP"]))
    sequence.update([Tokens("r", tokens_of("go ST"))])
    assert sequence.take_fresh().text == "go "
    sequence.update([Finished("r", FinishReason.LENGTH)])
    assert sequence.take_fresh().text == "ST"


def test_an_incomplete_character_at_the_end_is_one_replacement_character(tokenizer: Tokenizer) -> None:
    sequence = sequence_of(tokenizer, SamplingParams(max_tokens=20))
    sequence.update([Tokens("r", tokens_of("a🌈")[:-1]), Finished("r", FinishReason.LENGTH)])
    assert sequence.snapshot().text == "a\ufffd"


def test_logprobs_lead_with_the_token_itself(tokenizer: Tokenizer) -> None:
    sequence = sequence_of(tokenizer, SamplingParams(max_tokens=20, logprobs=2))
    entry = TokenLogprobs([67, 65, 66], [-3.0, -0.5, -1.0], 9)
    sequence.update([Tokens("r", [67], [entry], [None, entry]), Tokens("r", [65], [TokenLogprobs([65], [-0.5], 1)])])
    done = sequence.snapshot()
    assert done.logprobs is not None
    assert [(token, entry.rank) for token, entry in done.logprobs[0].items()] == [(67, 9), (65, 1), (66, 2)]
    assert done.logprobs[0][66].decoded_token == "B"
    assert done.cumulative_logprob == -3.5
    assert sequence.prompt_logprobs is not None
    assert sequence.prompt_logprobs[0] is None


def test_logprobs_that_were_asked_for_by_name_have_no_rank(tokenizer: Tokenizer) -> None:
    params = SamplingParams(max_tokens=20, logprob_token_ids=[66, 65, 67])
    assert (spec_of(params).logprobs, spec_of(params).logprob_token_ids) == (0, (66, 65, 67))
    sequence = sequence_of(tokenizer, params)
    entry = TokenLogprobs([67, 66, 65, 67], [-3.0, -1.0, -0.5, -3.0], 9)
    sequence.update([Tokens("r", [67], [entry])])
    (position,) = sequence.snapshot().logprobs or ()
    assert [(token, entry.rank) for token, entry in position.items()] == [(67, 9), (66, None), (65, None)]
    with pytest.raises(InvalidRequestError, match="out of vocabulary"):
        spec_of(SamplingParams(logprob_token_ids=[10**6]))


def test_without_detokenizing_there_is_no_text(tokenizer: Tokenizer) -> None:
    sequence = sequence_of(tokenizer, SamplingParams(max_tokens=20, detokenize=False))
    sequence.update([Tokens("r", [65, 66]), Finished("r", FinishReason.LENGTH)])
    assert (sequence.snapshot().text, sequence.snapshot().token_ids) == ("", [65, 66])


def test_an_aborted_sequence_shows_what_was_held_back(tokenizer: Tokenizer) -> None:
    sequence = sequence_of(tokenizer, SamplingParams(max_tokens=20, stop=["STOP"]))
    sequence.update([Tokens("r", tokens_of("go ST"))])
    sequence.cut_short()
    assert (sequence.snapshot().text, sequence.snapshot().finish_reason) == ("go ST", "abort")


# --- several sequences ----------------------------------------------------------------------


class Link:
    """The first sequence ends at once, the others never."""

    def submit(self, submit: Submit, arrived: asyncio.Event, sibling: str | None = None) -> RequestStream:
        stream = RequestStream(submit.request_id, arrived)
        stream.put(Tokens(submit.request_id, [65]))
        if submit.request_id == "0":
            stream.put(Finished("0", FinishReason.LENGTH))
        return stream

    def abort(self, request_ids: list[str]) -> None:
        pass


def test_an_abort_says_nothing_more_of_what_had_ended(tokenizer: Tokenizer) -> None:
    params = SamplingParams(n=3, max_tokens=8)
    children = [
        (Submit(str(index), [65], spec_of(params)), Sequence(index, tokenizer, [65], params, spec_of(params)))
        for index in range(3)
    ]
    generation = generation_on(Link(), params, children, OutputKind.DELTA, observer=None)

    async def main() -> list[list[tuple[int, str | None]]]:
        outputs = []
        async for output in outputs_of(generation):
            outputs.append([(part.index, part.finish_reason) for part in output.outputs])
            generation.abort()
        return outputs

    assert asyncio.run(main()) == [[(0, "length"), (1, None), (2, None)], [(1, "abort"), (2, "abort")]]
