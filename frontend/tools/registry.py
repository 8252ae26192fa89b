"""Tool parsers by name: built-in ones, and those registered by a plugin file."""

from collections.abc import Callable
from typing import TypeVar

from octavo.frontend.harmony.parser import HarmonyParser
from octavo.frontend.tools.hermes import HermesParser
from octavo.frontend.tools.llama3_json import Llama3JsonParser
from octavo.frontend.tools.mistral import MistralParser
from octavo.frontend.tools.parser import ToolParser
from octavo.frontend.tools.pythonic import PythonicParser
from octavo.frontend.tools.qwen3_xml import Qwen3XmlParser
from octavo.protocol.errors import ConfigError

Parser = TypeVar("Parser", bound=type[ToolParser])

_PHASE = "choosing the tool parser"

_parsers: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "qwen3_json": HermesParser,
    "llama3_json": Llama3JsonParser,
    "llama4_json": Llama3JsonParser,
    "mistral": MistralParser,
    "openai": HarmonyParser,
    "pythonic": PythonicParser,
    "llama4_pythonic": PythonicParser,
    "qwen3_xml": Qwen3XmlParser,
    "qwen3_coder": Qwen3XmlParser,
}


def register_tool_parser(name: str) -> Callable[[Parser], Parser]:
    """Decorate a `ToolParser` so that `--tool-call-parser NAME` finds it; an existing name is replaced."""

    def register(parser: Parser) -> Parser:
        _parsers[name] = parser
        return parser

    return register


def tool_parser(name: str) -> type[ToolParser]:
    """Return the parser with this name.

    Raises:
        ConfigError: no parser has this name.
    """
    if name not in _parsers:
        raise ConfigError(
            f"unknown tool parser {name!r}",
            phase=_PHASE,
            hint=f"--tool-call-parser is one of {', '.join(sorted(_parsers))}, or what --tool-parser-plugin registers",
        )
    return _parsers[name]
