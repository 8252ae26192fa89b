"""LongCat's calls, in `<longcat_tool_call>`: JSON like Hermes', or tags like GLM's in later models."""

from octavo.frontend.tools.json_marked import JsonObjectParser
from octavo.frontend.tools.json_reader import skip_space
from octavo.frontend.tools.marked import CallMatch
from octavo.frontend.tools.xml_formats import Glm45Parser


class _TagsParser(Glm45Parser):
    """A name, then tags: `<longcat_arg_key>x</longcat_arg_key><longcat_arg_value>value</longcat_arg_value>`."""

    openings = (("<longcat_tool_call>",),)
    tags = (
        *("<longcat_tool_call>", "</longcat_tool_call>", "<longcat_arg_key>", "</longcat_arg_key>"),
        *("<longcat_arg_value>", "</longcat_arg_value>"),
    )
    key, value_end = (tags[2], tags[3], tags[4]), tags[5]
    ends = (tags[1],)


class LongcatParser(JsonObjectParser):
    """Accepts both formats. Forced calls are written in JSON."""

    openings, tags = _TagsParser.openings, _TagsParser.tags
    begin, end, separator = "<longcat_tool_call>\n", "\n</longcat_tool_call>", "\n"

    def read(self, text: str, position: int, is_final: bool) -> CallMatch:
        """Read one call."""
        if text.startswith("{", skip_space(text, position)):
            return super().read(text, position, is_final)
        return _TagsParser(self.tools).read(text, position, is_final)
