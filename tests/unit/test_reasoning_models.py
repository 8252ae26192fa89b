"""Each reasoning parser on outputs in the form of its models, whole and in any pieces."""

import random

import pytest
from examples import examples
from fake_client import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.harmony.parser import HARMONY_REASONING
from octavo.frontend.reasoning.parser import ReasoningParser, ReasoningState, wants_reasoning
from octavo.frontend.reasoning.registry import reasoning_parser, reasoning_parser_names
from octavo.frontend.reasoning.tokens import num_reasoning_tokens
from octavo.frontend.tools.answer import AnswerFormat, AnswerStream, read_answer
from octavo.frontend.tools.json_formats import HermesParser

GRANITE = "Here is my thought process:"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'

CASES = [
    # Parser, end of the prompt, output, reasoning, content.
    ("deepseek_r1", "<assistant><think>\n", "hm\n</think>\n\nHi.", "hm", "Hi."),
    ("deepseek_r1", "<assistant>", "hm</think>Hi.", "hm", "Hi."),
    ("deepseek_v3", "<assistant><think>", "hm</think>Hi.", "hm", "Hi."),
    ("deepseek_v3", "<assistant></think>", "Hi.", "", "Hi."),
    ("deepseek_v3", "<assistant>", "Hi.", "", "Hi."),
    ("ernie45", "assistant\n<think>\n", "hm\n</think>\n\n<response>\nHi.\nHo.\n</response>\n", "hm", "Hi.\nHo."),
    ("ernie45", "assistant\n<think>\n", "hm\n</think>\nHi. </response> ends it.", "hm", "Hi. </response> ends it."),
    ("ernie45", "assistant\n<think>\n", "hm\n</think>\n<response>\nHi. </respo", "hm", "Hi. </respo"),
    ("glm45", "<|assistant|>", "\n<think>hm</think>\nHi.", "hm", "Hi."),
    ("glm45", "<|assistant|>\n<think></think>", "\nHi.", "", "\nHi."),
    ("glm47", "<|assistant|><think>", "hm</think>Hi.", "hm", "Hi."),
    ("granite", "assistant", f"{GRANITE} hm Here is my response: Hi.", "hm", "Hi."),
    ("granite", "assistant", "Here's my thought process:\nHere I am.\n\nHere's my response:\nHi.", "Here I am.", "Hi."),
    ("granite", "assistant", "Here is my thought failure", "", "Here is my thought failure"),
    ("granite", "assistant", f"{GRANITE} cut Here is my re", "cut Here is my re", ""),
    ("hunyuan_a13b", "<assistant>", "<think>\nhm\n</think>\n<answer>\nHi.\n</answer>", "hm", "Hi."),
    ("hunyuan_a13b", "<assistant>", "<think>\n\n</think>\n<answer>\nHi.\n</answer>\n", "", "Hi."),
    ("hunyuan", "<think>\n\n</think>\n", "<answer>\n</answer> ends it\n</answer>", "", "</answer> ends it"),
    ("hunyuan", "<assistant>", "No marks.", "", "No marks."),
    ("kimi_k2", "assistant<|im_middle|>", "<think>hm</think>Hi.", "hm", "Hi."),
    ("kimi_k2", "assistant<|im_middle|>", "hm <tool_call> </think>Hi.", "hm <tool_call>", "Hi."),
    ("minimax_m2", "]~b]ai\n<think>\n", "hm\n</think>\n\nHi.", "hm", "Hi."),
    ("mistral", "[/INST]", "[THINK]hm[/THINK]Hi.", "hm", "Hi."),
    ("mistral", "[/INST]", "Hi.", "", "Hi."),
    ("nemotron_v3", "<|im_start|>assistant\n<think>\n", "hm\n</think>\nHi.", "hm", "Hi."),
    ("nemotron", "Assistant\n<think></think>", "Hi.", "", "Hi."),
    ("olmo3", "<|im_start|>assistant\n<think>", "hm</think>Hi.", "hm", "Hi."),
    ("olmo3", "<|im_start|>assistant\n", "Hi.", "", "Hi."),
    ("qwen3", "<|im_start|>assistant\n", "<think>\nhm\n</think>\n\nHi.", "hm", "Hi."),
    ("mimo", "<|im_start|>assistant\n<think></think>", "Hi.", "", "Hi."),
    ("seed_oss", "<seed:bos>assistant\n", "<seed:think>hm</seed:think>Hi.", "hm", "Hi."),
    ("seed_oss", "<seed:bos>assistant\n", "hm </think></seed:think>Hi.", "hm </think>", "Hi."),
    ("step3", "<think>\n", "hm\n</think>\n\nHi.", "hm", "Hi."),
    ("step3p5", "<|im_start|>assistant\n<think>\n", "hm\n</think>\nHi. 😀", "hm", "Hi. 😀"),
]  # fmt: skip
NAMES = [name for name in reasoning_parser_names() if reasoning_parser(name) is not HARMONY_REASONING]
CALL_MARKS = [(name, mark) for name in NAMES for mark in reasoning_parser(name).call_marks]
VARIANTS = {name: reasoning_parser(name) for name in NAMES}
VARIANTS["mistral, marks as text"] = reasoning_parser("mistral").for_tokenizer(byte_tokenizer())
PIECES = [
    *("<think>", "</think>", "<th", "</thi", "[THINK]", "[/THINK]", "[TH", "<seed:think>", "</seed:think>", "<seed:"),
    *("Here is my thought process:", "Here's my thought process:", "Here is my response:", "Here", "Here is my "),
    *("<answer>", "</answer>", "<response>", "</response>", "</resp", "<ans", "\n<tool_call>", "<tool_call>", CALL),
    *("\n", "\n\n", " ", "é", "😀", "日本", "word", "<", ">", "[TOOL_CALLS]", "<|tool_calls_section_begin|>"),
    *("\n<minimax:tool_call>", "\n<seed:tool_call>", "<\uff5ctool_calls_begin\uff5c>"),
]


def stream(pieces: list[str], style: AnswerFormat) -> tuple[str, str, list[str]]:
    """Return what a client puts together."""
    reader = AnswerStream(style)
    deltas = [reader.push(piece) for piece in pieces] + [reader.push("", is_final=True)]
    calls: list[str] = []
    for call in (call for delta in deltas for call in delta.calls):
        calls += [""] * (call.name is not None)
        calls[call.index] += call.arguments
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas), calls


def whole(text: str, style: AnswerFormat) -> tuple[str, str, list[str]]:
    answer = read_answer(text, style)
    return answer.reasoning, answer.content, [call.arguments for call in answer.calls]


def check_all_cuts(text: str, style: AnswerFormat) -> None:
    expected = whole(text, style)
    assert stream(list(text), style) == expected
    for cut in range(len(text) + 1):
        assert stream([text[:cut], text[cut:]], style) == expected, cut


def test_every_parser_has_a_case() -> None:
    assert {name for name, *_ in CASES} == set(NAMES)


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "content"), CASES)
def test_outputs_of_models(name: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    parser = reasoning_parser(name)
    style = AnswerFormat(parser, parser.initial_state(prompt))
    assert whole(text, style) == (reasoning, content, [])
    check_all_cuts(text, style)
    for end in range(0, len(text), 7):
        check_all_cuts(text[:end], style)


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=examples(25, 60))
@given(
    text=st.lists(st.sampled_from(PIECES), max_size=10).map("".join),
    state=st.sampled_from(ReasoningState),
    has_tools=st.booleans(),
    dice=st.randoms(use_true_random=False),
)
def test_any_text_in_any_pieces(
    name: str, text: str, state: ReasoningState, has_tools: bool, dice: random.Random
) -> None:
    style = AnswerFormat(VARIANTS[name], state, HermesParser([]) if has_tools else None)
    expected = whole(text, style)
    assert stream(list(text), style) == expected
    cuts = sorted(dice.choices(range(len(text) + 1), k=3))
    assert stream([text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)], style) == expected


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=20)
@given(text=st.lists(st.sampled_from(PIECES), max_size=10).map("".join), state=st.sampled_from(ReasoningState))
def test_the_tokens_of_the_reasoning_hold_its_text(name: str, text: str, state: ReasoningState) -> None:
    tokenizer, parser = byte_tokenizer(), VARIANTS[name]
    token_ids = tokenizer.encode(text, False)
    count = num_reasoning_tokens(parser, state, token_ids, tokenizer)
    bounds = parser.bounds(text, state)
    if bounds is None or bounds.stop is None:
        assert count == (len(token_ids) if bounds else 0)
        return
    end = next((end for end in parser.ends if text.startswith(end, bounds.stop)), "")
    assert count == len(text[: bounds.stop + len(end)].encode())  # one token for each byte


@pytest.mark.parametrize(("name", "mark"), CALL_MARKS)
def test_a_call_ends_reasoning_that_was_not_closed(name: str, mark: str) -> None:
    parser = reasoning_parser(name)
    tag = mark.lstrip("\n")
    inside, rest = AnswerFormat(parser, ReasoningState.INSIDE), f"{tag}...\n"
    assert whole(f"hm\n{rest}", inside) == ("hm", rest, [])
    assert whole(rest, inside) == ("", rest, [])
    assert whole(f"hm{parser.end}{rest}", inside)[:2] == ("hm", rest)
    check_all_cuts(f"hm\n{rest}", inside)
    check_all_cuts(rest, inside)
    if tag != mark:
        mention = f"I could write {tag}.{parser.end}Hi."
        assert whole(mention, inside) == (f"I could write {tag}.", "Hi.", [])


def test_a_call_is_read_after_reasoning_that_was_not_closed() -> None:
    style = AnswerFormat(reasoning_parser("qwen3"), ReasoningState.INSIDE, HermesParser([]))
    assert whole(f"I call.\n{CALL}", style) == ("I call.", "", ['{"a": "é"}'])
    check_all_cuts(f"I call.\n{CALL}", style)


@pytest.mark.parametrize(
    ("variables", "wants"),
    [
        ({}, None),
        ({"enable_thinking": False}, False),
        ({"thinking": True}, True),
        ({"thinking": True, "enable_thinking": False}, True),
        ({"thinking": None}, None),
        ({"other": False}, None),
    ],
)
def test_template_variables_turn_reasoning_on_or_off(variables: dict[str, object], wants: bool | None) -> None:
    assert wants_reasoning(variables) is wants


def test_reasoning_that_was_turned_off_does_not_begin() -> None:
    for name, parser in VARIANTS.items():
        state = parser.initial_state("<assistant>", is_off=True)
        assert state is not ReasoningState.INSIDE, name
        opened = parser.initial_state("<assistant>" + parser.opening, is_off=True)
        assert opened is ReasoningState.INSIDE, name
        assert parser.initial_state("<assistant>" + parser.opening + parser.closing) is ReasoningState.OUTSIDE, name


def test_the_marks_fit_together() -> None:
    for name, parser in VARIANTS.items():
        assert isinstance(parser, ReasoningParser)
        assert parser.opening.strip() == parser.begins[0] and parser.closing.strip() == parser.end, name


@pytest.mark.parametrize("name", VARIANTS)
def test_long_reasoning_is_not_read_anew_with_each_piece(name: str) -> None:
    parser = VARIANTS[name]
    reader = AnswerStream(AnswerFormat(parser, ReasoningState.INSIDE))
    for _ in range(50):
        assert reader.push(" word").reasoning.strip() == "word"
        assert len(reader._text) <= max(map(len, parser.marks))
    assert reader.push(f" {parser.end} Hi.", is_final=True).content.strip() == "Hi."
