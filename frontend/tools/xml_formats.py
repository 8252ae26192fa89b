"""XML-like tool call formats, by model. Each class defines how one format differs from the others."""

from typing import ClassVar

from octavo.frontend.tools.json_call import read_call
from octavo.frontend.tools.json_reader import skip_space
from octavo.frontend.tools.marked import CallMatch
from octavo.frontend.tools.parser import Section, may_begin
from octavo.frontend.tools.xml_calls import XmlParser


class Qwen3XmlParser(XmlParser):
    """Qwen3-Coder: `<tool_call><function=f><parameter=x>value</parameter></function></tool_call>`."""

    openings = (("<tool_call>", "<function="),)
    tags = ("<tool_call>", "</tool_call>")
    begin, end = "<tool_call>\n<function=", "</function>\n</tool_call>"
    name_end = ">"
    key, value_end = ("<parameter=", ">"), "</parameter>"
    ends = ("</function>", "</tool_call>")
    padding = "\n"
    strips_line_breaks = True


class SeedOssParser(Qwen3XmlParser):
    """Seed-OSS: Qwen3-Coder's format with other outer tags, and with values without surrounding line breaks."""

    openings = (("<seed:tool_call>", "<function="),)
    tags = ("<seed:tool_call>", "</seed:tool_call>")
    begin, end = "<seed:tool_call>\n<function=", "</function>\n</seed:tool_call>"
    ends = ("</function>", "</seed:tool_call>")
    padding = ""


class MimoParser(Qwen3XmlParser):
    """MiMo: Qwen3-Coder's format with unchanged values, including line breaks."""

    padding = ""
    strips_line_breaks = False


class MinimaxM2Parser(XmlParser):
    """MiniMax M2: `<invoke name="f"><parameter name="x">value</parameter></invoke>` in `<minimax:tool_call>`."""

    openings: ClassVar[tuple[tuple[str, ...], ...]] = (("<minimax:tool_call>", "<invoke name="),)
    tags = ("<minimax:tool_call>", "</minimax:tool_call>")
    sections = (Section(tags[0], f"{tags[0]}\n", tags[1]),)
    begin, end = '<invoke name="', "</invoke>\n"
    name_end = '">'
    key, value_end = ('<parameter name="', '">'), "</parameter>"
    ends = ("</invoke>", tags[1])
    separator = ""


class DotsParser(MinimaxM2Parser):
    """dots: MiniMax M2's format in `<dots_function_call>`, or one JSON object with `name` and `arguments`."""

    openings = (("<dots_function_call>",), ("<invoke name=",))
    tags = ("<dots_function_call>", "</dots_function_call>")
    sections = (Section(tags[0], f"{tags[0]}\n", tags[1]),)
    ends = ("</invoke>", tags[1])

    def read(self, text: str, position: int, is_final: bool) -> CallMatch:
        """Read one call in either form."""
        start = skip_space(text, position)
        if text.endswith(self.tags[0], 0, position):
            if text.startswith("{", start):
                return read_call(text, start, is_final)
            invoke = self.openings[1][0]
            if not text.startswith(invoke, start):
                is_open = not is_final and may_begin(text, start, (invoke,))
                return CallMatch(None if is_open else position)
            position = start + len(invoke)
        return super().read(text, position, is_final)


class Step3Parser(XmlParser):
    """Step3: `<steptml:invoke name="f">` with `<steptml:parameter name="x">`, between the marks of a call."""

    openings = (
        ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "function", "<｜tool_sep｜>", "<steptml:invoke name="),
    )
    call_end, section_end = "<｜tool_call_end｜>", "<｜tool_calls_end｜>"
    tags = ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>", call_end, section_end)
    sections = (Section(tags[0], tags[0], section_end),)
    begin, end = f'{tags[1]}function{tags[2]}<steptml:invoke name="', f"</steptml:invoke>{call_end}"
    name_end = '">'
    key, value_end = ('<steptml:parameter name="', '">'), "</steptml:parameter>"
    ends = ("</steptml:invoke>", call_end)
    line = separator = ""


class Glm45Parser(XmlParser):
    """GLM 4.5 and 4.6: `<tool_call>f` with `<arg_key>x</arg_key><arg_value>value</arg_value>`, one per line."""

    openings = (("<tool_call>",),)
    tags = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    begin, end = "<tool_call>", "</tool_call>"
    name_end = ""
    key, value_end = ("<arg_key>", "</arg_key>", "<arg_value>"), "</arg_value>"
    ends = ("</tool_call>",)


class Glm47Parser(Glm45Parser):
    """GLM 4.7: GLM 4.5's format without line breaks."""

    line = separator = ""
