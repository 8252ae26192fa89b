"""Tool call formats in JSON, by model. Each class defines how its format differs from others of the same base class."""

import json
import re
from collections.abc import Mapping
from typing import Any

from octavo.frontend.tools.json_call import read_call
from octavo.frontend.tools.json_marked import JsonArrayParser, JsonNamedParser, JsonObjectParser
from octavo.frontend.tools.json_reader import skip_space
from octavo.frontend.tools.marked import CallMatch
from octavo.frontend.tools.parser import CallForm, Section
from octavo.frontend.tools.tag_formats import NUMBER, fixed, json_of, sequence, tag


class HermesParser(JsonObjectParser):
    """Hermes, Qwen2.5, Qwen3, Granite 4: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    openings = (("<tool_call>",),)
    tags: tuple[str, ...] = ("<tool_call>", "</tool_call>")
    begin, end, separator = "<tool_call>\n", "\n</tool_call>", "\n"


class Ernie45Parser(HermesParser):
    """ERNIE 4.5: Hermes' calls. The content may be between `<response>` and `</response>`."""

    content_marks = ("<response>", "</response>")
    tags = (*HermesParser.tags, *content_marks)


class Granite20bParser(JsonObjectParser):
    """Granite 20B function calling: `<function_call> {"name": ..., "arguments": {...}}`, without a closing mark."""

    openings = (("<function_call>",),)
    tags = ("<function_call>",)
    begin = "<function_call> "


class InternLmParser(JsonObjectParser):
    """InternLM 2: `<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>`."""

    openings = (("<|action_start|>", "<|plugin|>"),)
    tags = ("<|action_start|>", "<|plugin|>", "<|action_end|>")
    begin, end = "<|action_start|><|plugin|>\n", "<|action_end|>"
    arguments_key = "parameters"


class GraniteParser(JsonArrayParser):
    """Granite 3: `<|tool_call|>[{"name": ..., "arguments": {...}}]`; 3.1 writes `<tool_call>`."""

    openings = (("<|tool_call|>",), ("<tool_call>",))
    tags = ("<|tool_call|>", "<tool_call>")
    sections = tuple(Section(mark, f"{mark}[", "]") for mark in tags)


class JambaParser(JsonArrayParser):
    """Jamba: one call per line in `<tool_calls>[...]</tool_calls>`."""

    openings = (("<tool_calls>",),)
    tags = ("<tool_calls>", "</tool_calls>")
    sections = (Section("<tool_calls>", "<tool_calls>[\n    ", "\n]</tool_calls>"),)
    separator = ",\n    "


class HunyuanA13bParser(JsonArrayParser):
    """Hunyuan A13B: `<tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>`."""

    openings = (("<tool_calls>",),)
    tags = ("<tool_calls>", "</tool_calls>")
    sections = (Section("<tool_calls>", "<tool_calls>[", "]</tool_calls>"),)


class Phi4MiniParser(JsonArrayParser):
    """Phi-4-mini: `functools[{"name": ..., "arguments": {...}}, ...]`.

    If the template uses its tokens for calls: `<|tool_call|>`, one call or an array, `<|/tool_call|>`.
    """

    openings = (("functools",), ("<|tool_call|>",))
    tags = ("<|tool_call|>", "<|/tool_call|>")
    sections = (Section("functools[", "functools[", "]"),)

    def read(self, text: str, position: int, is_final: bool) -> CallMatch:
        """Read one array, or one call after the token."""
        start = skip_space(text, position)
        if text.endswith("<|tool_call|>", 0, position) and text.startswith("{", start):
            return read_call(text, start, is_final)
        return super().read(text, position, is_final)


class CohereParser(JsonArrayParser):
    """Command R7B and A: `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]`.

    The content is between `<|START_RESPONSE|>` and `<|END_RESPONSE|>`, or between the same marks with TEXT.
    """

    openings = (("<|START_ACTION|>",),)
    content_marks = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
    tags = ("<|START_ACTION|>", "<|END_ACTION|>", *content_marks)
    sections = (Section("<|START_ACTION|>", "<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),)
    separator = ",\n    "
    name_key = "tool_name"

    def call_form(self, name: str, schema: Mapping[str, Any]) -> CallForm:
        """Return the object around the arguments."""
        content = sequence(NUMBER, fixed(f'", "tool_name": {json.dumps(name)}, "parameters": '), json_of(schema))
        return CallForm((), tag('{"tool_call_id": "', content, "}"), self.separator)


class XlamParser(JsonArrayParser):
    """xLAM: an array `[{"name": ..., "arguments": {...}}, ...]`, with or without marks or a code fence before it."""

    openings = (
        ("```json", "["),
        ("```", "["),
        ("[TOOL_CALLS]", "["),
        ("<tool_call>", "["),
    )
    tags = ("[TOOL_CALLS]", "<tool_call>", "</tool_call>")
    sections = (Section('[{"name": ', '[{"name": ', "]"),)
    begin, separator = "", ', {"name": '
    needs_arguments = True

    def read(self, text: str, position: int, is_final: bool) -> CallMatch:
        """Read the array whose bracket precedes this position."""
        return super().read(text, position - 1, is_final)


class DeepseekV3Parser(JsonNamedParser):
    """DeepSeek V3 and R1: the arguments are in a code fence after type and name."""

    openings = (("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>"),)
    call_end, section_end = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
    tags = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", call_end, section_end)
    sections = (Section(tags[0], tags[0], section_end),)
    begin, before_arguments, end = f"{tags[1]}function{tags[2]}", "\n```json\n", f"\n```{call_end}"
    name_end, end_mark = "```json", "```"
    separator = "\n"


class DeepseekV31Parser(JsonNamedParser):
    """DeepSeek V3.1: `<｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>` in V3's section."""

    openings = (("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),)
    tags, sections = DeepseekV3Parser.tags, DeepseekV3Parser.sections
    begin, before_arguments, end = tags[1], tags[2], tags[3]
    name_end, end_mark = tags[2], tags[3]


class KimiK2Parser(JsonNamedParser):
    """Kimi K2: the call's id, `functions.NAME:NUMBER`, takes the place of the name."""

    openings = (("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),)
    tags = (
        *openings[0], "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>",
    )  # fmt: skip
    sections = (Section(tags[0], tags[0], tags[4]),)
    begin, before_arguments, end = f"{tags[1]}functions.", tags[2], tags[3]
    name_end, end_mark = tags[2], tags[3]

    _id = re.compile(r"(?:functions\.)?(.+):\d+")

    def name_and_id(self, head: str) -> tuple[str, str | None]:
        """Return the name that the id contains, and the id."""
        found = self._id.fullmatch(head)
        return (found[1], head) if found else (head.removeprefix("functions."), None)

    def call_form(self, name: str, schema: Mapping[str, Any]) -> CallForm | None:
        """Return the id and the marks around the arguments."""
        if not self._id.fullmatch(f"{name}:0") or self.name_and_id(f"functions.{name}:0")[0] != name:
            return None
        content = sequence(NUMBER, fixed(self.before_arguments), json_of(schema))
        return self.marked_form(f"{self.begin}{name}:", content, self.end)
