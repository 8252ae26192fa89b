"""Harmony: answers in channels, whole and in any pieces; grammars of its calls and answers; its conversations."""

import random
import re
from typing import Any

import pytest
from examples import examples
from fake_client import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core_proc.grammar.matcher import GrammarTokens, Matcher, source_of
from octavo.frontend.conversation.settings import ChatSettings
from octavo.frontend.generation.grammar import grammar_spec
from octavo.frontend.harmony.format import HarmonyFormat
from octavo.frontend.harmony.header import CALL, CHANNEL, CONSTRAIN, END, MARKS, MESSAGE, RETURN, START
from octavo.frontend.harmony.plan import plan_harmony
from octavo.frontend.harmony.prompt import harmony_messages
from octavo.frontend.harmony.reader import HarmonyReader
from octavo.frontend.tools.json_reader import StringEscaper
from octavo.frontend.tools.parser import FunctionTool
from octavo.frontend.tools.plan import ToolChoice
from octavo.frontend.tools.registry import tool_parser
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import ConfigError, InvalidRequestError
from octavo.protocol.structured import StructuredOutputsParams

PROMPT = f"{START}user{MESSAGE}hi{END}{START}assistant"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"
COMMENTARY = f"{CHANNEL}commentary{MESSAGE}"
NEXT = f"{END}{START}assistant"


def call(name: str, arguments: str, end: str = CALL) -> str:
    return f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}{arguments}{end}"


Answer = tuple[str, str, list[tuple[str, str]]]
"""Reasoning, content, and calls with their arguments."""

CASES: list[tuple[str, Answer]] = [
    (f"{ANALYSIS}hm{NEXT}{FINAL}Hi.{RETURN}", ("hm", "Hi.", [])),
    (f"{FINAL}Hi.", ("", "Hi.", [])),
    (f"{ANALYSIS}hm{NEXT}" + call("f", '{"a": 1}'), ("hm", "", [("f", '{"a": 1}')])),
    (f" to=functions.f{CHANNEL}commentary json{MESSAGE}{{}}{CALL}", ("", "", [("f", "{}")])),
    (f"{CHANNEL}analysis to=functions.f{CONSTRAIN}json{MESSAGE}\n{{}} {CALL}", ("", "", [("f", "{}")])),
    (f"{CHANNEL}commentary to=f {CONSTRAIN}json{MESSAGE}{{}}", ("", "", [("f", "{}")])),
    (call("f", ""), ("", "", [("f", "{}")])),
    (call("f", '{"s": "a\nb"}'), ("", "", [("f", '{"s": "a\\nb"}')])),
    (f"{COMMENTARY}I look.{NEXT}" + call("f", "{}"), ("", "I look.", [("f", "{}")])),
    (
        f"{ANALYSIS}a{NEXT}{COMMENTARY}I look.{NEXT}{ANALYSIS} b {NEXT}"
        + call("f", "{}", END)
        + f"{START}assistant"
        + call("g.h", '{"é": "😀"}'),
        ("a\nb", "I look.", [("f", "{}"), ("g.h", '{"é": "😀"}')]),
    ),
    (f"{COMMENTARY}One.{NEXT}{FINAL}Two.", ("", "One.\nTwo.", [])),
    (f"{CHANNEL}analysis to=browser.search code{MESSAGE}{{}}{CALL}", ("{}", "", [])),
    (call("f", "{}") + "commentary" + call("f", '{"a": 2}'), ("", "", [("f", "{}"), ("f", '{"a": 2}')])),
    (f"{ANALYSIS}hm{CHANNEL}final{MESSAGE}Hi.", ("hm", "Hi.", [])),
    (f"{ANALYSIS}hm{NEXT}{MESSAGE}Hi.", ("hm", "Hi.", [])),
    (f"{ANALYSIS}cut\n", ("cut", "", [])),
    (f"{ANALYSIS}hm{NEXT}{CHANNEL}fin", ("hm", "", [])),
    (f"{FINAL}a < b <| c", ("", "a < b <| c", [])),
    (call("f", '{"a": "cut', ""), ("", "", [("f", '{"a": "cut')])),
    (f"{ANALYSIS}think{END}The answer is 4.", ("think", "The answer is 4.", [])),
    (f"{COMMENTARY}I look.{END}The answer is 4.\n", ("", "I look.\nThe answer is 4.\n", [])),
    (f"{FINAL}Hi.{END}\n", ("", "Hi.", [])),
    (call("f", "{}") + "The answer is 4.", ("", "", [("f", "{}")])),
    (f"{CHANNEL}commentary {CONSTRAIN}json to=functions.f{MESSAGE}{{}}{CALL}", ("", "", [("f", "{}")])),
    ("No channels at all. <|", ("", "No channels at all. <|", [])),
    ("", ("", "", [])),
]
PIECES = [
    *(*MARKS, "assistant", "analysis", "commentary", "final", " to=functions.f", " json", ANALYSIS, FINAL, NEXT),
    *("<|", "<|en", "<|start|", " ", "\n", "é", "😀", "text", '{"a": "', '"}', "{}", "\x01", COMMENTARY),
    call("f", "{}"),
]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Ulm", "Bonn"]}}, "required": ["city"]}
TOOLS = [FunctionTool("f", SCHEMA), FunctionTool("g.h", {"type": "object", "properties": {}})]
FORMAT = HarmonyFormat(PROMPT, frozenset({"f", "g.h"}))


def read(pieces: list[str], style: HarmonyFormat = FORMAT) -> Answer:
    """Return what a client puts together."""
    reader = style.open()
    deltas = [reader.push(piece).merged() for piece in pieces] + [reader.push("", is_final=True).merged()]
    names: list[str] = []
    arguments: list[str] = []
    for part in (part for delta in deltas for part in delta.calls):
        if part.name is not None:
            assert part.index == len(names) and part.id
            names.append(part.name)
            arguments.append("")
        arguments[part.index] += part.arguments
    assert reader.num_calls == len(names)
    reasoning, content = ("".join(getattr(delta, name) for delta in deltas) for name in ("reasoning", "content"))
    return reasoning, content, list(zip(names, arguments, strict=True))


@pytest.mark.parametrize(("text", "answer"), CASES)
def test_answers_in_channels(text: str, answer: Answer) -> None:
    assert read([text]) == answer
    assert read(list(text)) == answer
    for cut in range(len(text) + 1):
        assert read([text[:cut], text[cut:]]) == answer, cut


@settings(max_examples=examples(100, 300))
@given(
    text=st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    prompt=st.sampled_from([PROMPT, PROMPT + ANALYSIS, PROMPT + FINAL + "I", ""]),
    dice=st.randoms(use_true_random=False),
)
def test_any_text_in_any_pieces(text: str, prompt: str, dice: random.Random) -> None:
    style = HarmonyFormat(prompt, frozenset({"f"}))
    whole = read([text], style)
    assert read(list(text), style) == whole
    cuts = sorted(dice.choices(range(len(text) + 1), k=3))
    assert read([text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)], style) == whole


def test_an_answer_continues_its_prompt() -> None:
    assert read([f"hm{NEXT}{FINAL}Hi."], HarmonyFormat(PROMPT + ANALYSIS)) == ("hm", "Hi.", [])
    assert read([" you.", RETURN], HarmonyFormat(f"{PROMPT}{FINAL}Hi <|")) == ("", " you.", [])
    assert read([f"{START}assistant{FINAL}Hi."], HarmonyFormat(PROMPT + ANALYSIS + END)) == ("", "Hi.", [])


def test_without_functions_a_call_is_not_for_the_user() -> None:
    assert read([call("f", "{}")], HarmonyFormat(PROMPT)) == ("{}", "", [])


def test_calls_beyond_the_limit_are_dropped() -> None:
    style = HarmonyFormat(PROMPT, frozenset({"f"}), 1)
    assert read([call("f", '{"a": 1}') + call("f", '{"a": 2}')], style) == ("", "", [("f", '{"a": 1}')])


def test_tokens_of_the_reasoning_are_counted() -> None:
    tokenizer = byte_tokenizer()
    text = f"{ANALYSIS}é!{NEXT}{COMMENTARY}I look.{NEXT}{ANALYSIS}b"
    token_ids = tokenizer.encode(text, False)  # one for each byte
    assert FORMAT.num_reasoning_tokens(token_ids, tokenizer) == len("é!".encode()) + len(END) + 1


class MarkTokenizer:
    """Marks are tokens, as in GPT-OSS; every other character is one too."""

    def token_id(self, token: str) -> int | None:
        return MARKS.index(token) if token in MARKS else None

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(MARKS[token_id] if token_id < len(MARKS) else chr(token_id) for token_id in token_ids)


def test_marks_that_are_tokens_are_counted_once() -> None:
    token_ids = [
        *(MARKS.index(CHANNEL), *map(ord, "analysis"), MARKS.index(MESSAGE), *map(ord, "hm"), MARKS.index(END)),
        *(MARKS.index(START), *map(ord, "assistant"), MARKS.index(CHANNEL), *map(ord, "final"), MARKS.index(MESSAGE)),
        *map(ord, "Hi."),
    ]
    assert FORMAT.num_reasoning_tokens(token_ids, MarkTokenizer()) == 3


def test_a_long_answer_is_read_once() -> None:
    reader = HarmonyReader.continuing(PROMPT, frozenset({"f"}))
    reader.push(FINAL)
    for _ in range(1000):
        assert reader.push("words ").content == "words "
        assert len(reader._text) == 0


def test_long_arguments_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = 0
    push = StringEscaper.push

    def counted(self: StringEscaper, text: str) -> str:
        nonlocal seen
        seen += len(text)
        return push(self, text)

    monkeypatch.setattr(StringEscaper, "push", counted)
    reader = HarmonyReader.continuing(PROMPT, frozenset({"f"}))
    reader.push(f"{CHANNEL}commentary to=functions.f {CONSTRAIN}json{MESSAGE}{{")
    pieces = ['\n  "k": "a\nb",'] * 5000
    returned = "".join(call.arguments for piece in pieces for call in reader.push(piece).calls)
    assert returned.count("a\\nb") == 5000
    assert len(reader._text) == 0 and seen == sum(map(len, pieces)) + 1


def compiled(form: StructuredOutputsParams) -> Matcher:
    form.verify()
    return Matcher.compile(GrammarTokens.of_bytes(), source_of(grammar_spec(form, {})))


def fits(matcher: Matcher, text: str) -> bool:
    """Return whether the text is a whole output of the grammar."""
    matcher = matcher.copy()
    return all(matcher.accept(byte) for byte in text.encode()) and (matcher.mask()[1] or matcher.is_complete)


def form_of(choice: ToolChoice, tools: list[FunctionTool] = TOOLS, **fields: Any) -> StructuredOutputsParams:
    plan = plan_harmony(tools, choice, is_parallel=True, auto_parser=tool_parser("openai"), **fields)
    assert plan.form is not None
    return plan.form


HEAD = f"{START}assistant"
GOOD = HEAD + call("f", '{"city": "Ulm"}', "")


def test_forced_calls_are_written_in_channels() -> None:
    required = compiled(form_of(ToolChoice("required")))
    assert fits(required, GOOD) and fits(required, HEAD + call("g.h", "{}", ""))
    assert fits(required, f"{HEAD}{COMMENTARY}I look.{END}{GOOD}")
    for text in (
        f"{HEAD}{FINAL}Hi.",
        HEAD + call("f", '{"city": "Rom"}', ""),
        HEAD + call("f", "{}", ""),
        "",
        GOOD * 2,
    ):
        assert not fits(required, text), text
    named = compiled(form_of(ToolChoice(named="g.h")))
    assert fits(named, HEAD + call("g.h", "{}", "")) and not fits(named, GOOD)


def test_marks_that_are_tokens_are_tokens_of_the_grammar() -> None:
    ids = {mark: 256 + number for number, mark in enumerate(MARKS)}
    tokens = GrammarTokens([*(bytes([byte]) for byte in range(256)), *map(str.encode, MARKS)], list(ids.values()))
    matcher = Matcher.compile(tokens, source_of(grammar_spec(form_of(ToolChoice("required")), ids)))

    def accepts(text: str, *, as_text: str = "") -> bool:
        copy = matcher.copy()
        pieces = re.split("(" + "|".join(map(re.escape, MARKS)) + ")", text)
        token_ids = [
            token_id
            for piece in pieces
            for token_id in ([ids[piece]] if piece in ids and piece != as_text else piece.encode())
        ]
        return all(map(copy.accept, token_ids)) and (copy.mask()[1] or copy.is_complete)

    assert accepts(GOOD) and accepts(f"{HEAD}{COMMENTARY}I <|look|>.{END}{GOOD}")
    assert not accepts(GOOD, as_text=MESSAGE)
    assert not accepts(f"{HEAD}{COMMENTARY}I look.{CALL}{GOOD}")


def test_strict_calls_leave_the_answer_free() -> None:
    strict = [FunctionTool(tool.name, tool.parameters, is_strict=True) for tool in TOOLS]
    matcher = compiled(form_of(ToolChoice(), strict))
    assert fits(matcher, GOOD) and fits(matcher, f"{HEAD}{FINAL}Anything.\n")
    assert not fits(matcher, HEAD + call("f", '{"city": "Rom"}', ""))
    assert plan_harmony(TOOLS, ToolChoice(), is_parallel=True, auto_parser=tool_parser("openai")).form is None


def test_allowed_tools_are_the_only_ones_called() -> None:
    matcher = compiled(form_of(ToolChoice(allowed=frozenset({"f"}))))
    assert fits(matcher, HEAD + call("f", '{"any": 1}', "")) and not fits(matcher, HEAD + call("g.h", "{}", ""))


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (
            StructuredOutputsParams(json=SCHEMA),
            f'final {CONSTRAIN}json{MESSAGE}{{"city": "Ulm"}}',
            f"final{MESSAGE}Ulm",
        ),
        (StructuredOutputsParams(json_object=True), f"final {CONSTRAIN}json{MESSAGE}{{}}", f"final{MESSAGE}{{}}"),
        (StructuredOutputsParams(regex="[a-c]+"), f"final{MESSAGE}abc", f"final{MESSAGE}d"),
        (StructuredOutputsParams(choice=["yes", "no"]), f"final{MESSAGE}no", f"final{MESSAGE}none"),
        (
            StructuredOutputsParams(structural_tag={"format": {"type": "const_string", "value": "x"}}),
            f"final{MESSAGE}x",
            f"final{MESSAGE}y",
        ),
    ],
)
def test_forms_apply_within_the_final_channel(form: StructuredOutputsParams, good: str, bad: str) -> None:
    for tools in ([], TOOLS):
        plan = plan_harmony(tools, ToolChoice(), is_parallel=True, auto_parser=tool_parser("openai"), answer_form=form)
        assert plan.form is not None
        matcher = compiled(plan.form)
        assert fits(matcher, f"{HEAD}{CHANNEL}{good}") and not fits(matcher, f"{HEAD}{CHANNEL}{bad}")
        assert fits(matcher, GOOD) == bool(tools)


def test_grammars_begin_after_the_header_of_the_final_channel() -> None:
    form = StructuredOutputsParams(grammar='start: "x"')
    plan = plan_harmony([], ToolChoice(), is_parallel=True, auto_parser=None, answer_form=form)
    assert plan.form is not None and plan.form.start_after == FINAL
    own = StructuredOutputsParams(grammar='start: "x"', start_after="!")
    assert plan_harmony([], ToolChoice(), is_parallel=True, auto_parser=None, answer_form=own).form is own


def test_a_continued_text_is_no_call() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        form_of(ToolChoice("required"), is_continued=True)
    assert caught.value.param == "tool_choice"
    form = StructuredOutputsParams(regex="a")
    assert form_of(ToolChoice(), is_continued=True, answer_form=form) is form


def test_the_settings_of_both_parsers_fit_together() -> None:
    tools = {"enable_auto_tool_choice": True, "tool_call_parser": "openai"}
    for fields in (tools, {"reasoning_parser": "openai"}, {"reasoning_parser": "openai_gptoss"}):
        assert ChatSettings.of(ServerConfig(**fields)).is_harmony
    for fields in (
        {**tools, "reasoning_parser": "qwen3"},
        {**tools, "tool_call_parser": "hermes", "reasoning_parser": "openai"},
    ):
        with pytest.raises(ConfigError, match="read different formats"):
            ChatSettings.of(ServerConfig(**fields))


def test_several_calls_become_several_messages() -> None:
    calls = [{"id": str(number), "function": {"name": "f", "arguments": "{}"}} for number in range(2)]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": calls},
        *[{"role": "tool", "tool_call_id": name, "content": name} for name in ("1", "0", "other")],
        {"role": "assistant", "content": "Done.", "reasoning": "so"},
    ]
    shown = harmony_messages(messages, knows_thinking=True)
    assert [message["role"] for message in shown] == ["user", *["assistant", "tool"] * 2, "tool", "assistant"]
    assert (shown[1]["thinking"], shown[1]["content"], shown[1]["tool_calls"]) == ("hm\nI look.", "", calls[:1])
    assert (shown[3].get("thinking"), shown[3]["content"], shown[3]["tool_calls"]) == (None, "", calls[1:])
    assert [shown[place]["content"] for place in (2, 4, 5)] == ["0", "1", "other"]
    assert shown[6]["thinking"] == "so"
    as_given = harmony_messages(messages, knows_thinking=False)
    assert as_given[1]["content"] == "I look." and "thinking" not in as_given[1]
    malformed: list[Any] = [5, {"role": "assistant", "tool_calls": "x"}, {"role": "assistant", "tool_calls": [5, 6]}]
    assert len(harmony_messages(malformed, knows_thinking=True)) == 4
