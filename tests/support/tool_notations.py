"""How models write tool calls, stated independently of the parsers: one writer for each notation."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Call = tuple[str, Mapping[str, Any]]
Writer = Callable[[Sequence[Call]], str]


@dataclass(frozen=True)
class Notation:
    """One notation.

    Args:
        write: writes calls as the model's chat template does.
        has_bare_text: strings are not quoted, so only a schema distinguishes them from other values.
        malformed: text that is not a valid integer; empty: any text is a value.
        marks: fragments for random texts.
        has_identifiers: the names of arguments are identifiers.
    """

    write: Writer
    has_bare_text: bool = False
    marks: tuple[str, ...] = ()
    has_identifiers: bool = False
    malformed: str = "tru!"


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def objects(before: str, after: str, between: str = "", key: str = "arguments") -> Notation:
    def write(calls: Sequence[Call]) -> str:
        return between.join(before + dumps({"name": name, key: args}) + after for name, args in calls)

    return Notation(write, marks=(before.strip(), after.strip()))


def array(before: str, after: str, between: str = ", ") -> Notation:
    def write(calls: Sequence[Call]) -> str:
        return before + between.join(dumps({"name": name, "arguments": args}) for name, args in calls) + after

    return Notation(write, marks=(before.strip(), after.strip(), '{"name": "f", "arguments": {'))


def numbered(before: str, after: str, between: str) -> Notation:
    def write(calls: Sequence[Call]) -> str:
        written = (
            dumps({"tool_call_id": str(number), "tool_name": name, "parameters": args})
            for number, (name, args) in enumerate(calls)
        )
        return before + between.join(written) + after

    return Notation(write, marks=(before.strip(), after.strip(), '{"tool_name": "f", "parameters": {'))


def named(section: tuple[str, str], call: tuple[str, str, str], between: str = "") -> Notation:
    """The name, then the arguments; NUMBER in a mark is the call's."""

    def write(calls: Sequence[Call]) -> str:
        written = [
            call[0] + name + call[1].replace("NUMBER", str(number)) + dumps(args) + call[2]
            for number, (name, args) in enumerate(calls)
        ]
        return section[0] + between.join(written) + section[1]

    return Notation(write, marks=(*section, *call, call[0] + "f" + call[1].replace("NUMBER", "0")))


def xml(
    section: tuple[str, str], call: tuple[str, str, str], argument: tuple[str, str, str], between: str = ""
) -> Notation:
    def write(calls: Sequence[Call]) -> str:
        written = [
            call[0] + name + call[1] + "".join(
                argument[0] + key + argument[1] + (value if isinstance(value, str) else dumps(value)) + argument[2]
                for key, value in args.items()
            ) + call[2]
            for name, args in calls
        ]  # fmt: skip
        return section[0] + between.join(written) + section[1]

    marks = (
        *section,
        *call,
        *argument,
        call[0] + "f" + call[1],
        *(f"{argument[0]}{key}{argument[1]}" for key in "sno"),
    )
    return Notation(write, has_bare_text=True, marks=marks, malformed="")


def gemma(before: str, after: str, quote: str) -> Notation:
    def value(value: object) -> str:
        if isinstance(value, str):
            return quote + value + quote
        if isinstance(value, list):
            return "[" + ",".join(map(write_value, value)) + "]"
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{key}:{write_value(inner)}" for key, inner in value.items()) + "}"
        return dumps(value)

    write_value = value

    def write(calls: Sequence[Call]) -> str:
        return "".join(before + name + value(args) + after for name, args in calls)

    return Notation(
        write,
        has_bare_text=True,
        has_identifiers=True,
        malformed='5"',
        marks=(before, after, quote, f"{before}f{{s:", "n:", "o:{k:[", ","),
    )


def python(section: tuple[str, str], between: str) -> Notation:
    def write(calls: Sequence[Call]) -> str:
        written = (
            f"{name}({', '.join(f'{key}={dumps(value)}' for key, value in args.items())})" for name, args in calls
        )
        return section[0] + between.join(written) + section[1]

    return Notation(write, has_identifiers=True, marks=(*section, between, "f(n=", "s='x'", "f()", ")", ", "))


HERMES = objects("<tool_call>\n", "\n</tool_call>", "\n")


def answered(notation: Notation, *marks: str) -> Notation:
    """Return a notation whose content may be enclosed by marks."""
    return replace(notation, marks=(*notation.marks, *marks, "".join((marks[0], "Hi", marks[1], "\n"))))


QWEN = xml(
    ("", ""),
    ("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"),
    ("<parameter=", ">\n", "\n</parameter>\n"),
    "\n",
)
LONGCAT_TAGS = xml(
    ("", ""),
    ("<longcat_tool_call>", "\n", "</longcat_tool_call>"),
    ("<longcat_arg_key>", "</longcat_arg_key>\n<longcat_arg_value>", "</longcat_arg_value>\n"),
    "\n",
)
"""How later models of LongCat write calls; forced ones are in JSON."""
STEP = ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>")
SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

NOTATIONS = {
    "cohere_command3": answered(
        numbered("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>", ",\n    "), "<|START_RESPONSE|>", "<|END_RESPONSE|>"
    ),
    "deepseek_v3": named(SECTION, (f"{CALL}function{SEPARATOR}", "\n```json\n", f"\n```{CALL_END}"), "\n"),
    "deepseek_v31": named(SECTION, (CALL, SEPARATOR, CALL_END)),
    "ernie45": answered(HERMES, "<response>", "</response>"),
    "functiongemma": gemma("<start_function_call>call:", "<end_function_call>", "<escape>"),
    "gemma4": gemma("<|tool_call>call:", "<tool_call|>", '<|"|>'),
    "glm45": xml(
        ("", ""),
        ("<tool_call>", "\n", "</tool_call>"),
        ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        "\n",
    ),
    "glm47": xml(("", ""), ("<tool_call>", "", "</tool_call>"), ("<arg_key>", "</arg_key><arg_value>", "</arg_value>")),
    "granite": array("<|tool_call|>[", "]"),
    "granite-20b-fc": objects("<function_call> ", ""),
    "granite4": HERMES,
    "hermes": HERMES,
    "hunyuan_a13b": array("<tool_calls>[", "]</tool_calls>"),
    "internlm": objects("<|action_start|><|plugin|>\n", "<|action_end|>", key="parameters"),
    "jamba": array("<tool_calls>[\n    ", "\n]</tool_calls>", ",\n    "),
    "kimi_k2": named(
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ("<|tool_call_begin|>functions.", ":NUMBER<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "lfm2": python(("<|tool_call_start|>[", "]<|tool_call_end|>"), ", "),
    "llama3_json": objects("", "", "; ", "parameters"),
    "longcat": replace(
        objects("<longcat_tool_call>\n", "\n</longcat_tool_call>", "\n"), marks=(*LONGCAT_TAGS.marks, '{"name": "f"')
    ),
    "dots": xml(
        ("<dots_function_call>\n", "</dots_function_call>"),
        ('<invoke name="', '">\n', "</invoke>\n"),
        ('<parameter name="', '">', "</parameter>\n"),
    ),
    "mimo": xml(
        ("", ""),
        ("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"),
        ("<parameter=", ">", "</parameter>\n"),
        "\n",
    ),
    "minimax_m2": xml(
        ("<minimax:tool_call>\n", "</minimax:tool_call>"),
        ('<invoke name="', '">\n', "</invoke>\n"),
        ('<parameter name="', '">', "</parameter>\n"),
    ),
    "mistral": named(("", ""), ("[TOOL_CALLS]", "", "")),
    "olmo3": python(("<function_calls>", "</function_calls>"), "\n"),
    "phi4_mini_json": array("functools[", "]"),
    "qwen3_coder": QWEN,
    "seed_oss": xml(
        ("", ""),
        ("<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>"),
        ("<parameter=", ">", "</parameter>\n"),
        "\n",
    ),
    "step3": xml(
        STEP,
        (
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
            '">',
            "</steptml:invoke><｜tool_call_end｜>",
        ),
        ('<steptml:parameter name="', '">', "</steptml:parameter>"),
    ),
    "xlam": array("[", "]"),
}
"""One name for each notation; `ALIASES` has the others."""

ALIASES = {
    "cohere_command4": "cohere_command3",
    "ling3": "glm45",
    "llama4_json": "llama3_json",
    "poolside_v1": "glm45",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
}
