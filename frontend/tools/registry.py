"""Tool parsers by name: the built-in ones, and those that a plugin file registers."""

from collections.abc import Callable
from typing import TypeVar

from octavo.frontend.harmony.parser import HarmonyParser
from octavo.frontend.tools import gemma_calls, json_formats, python_marked, xml_formats
from octavo.frontend.tools.llama3_json import Llama3JsonParser
from octavo.frontend.tools.longcat import LongcatParser
from octavo.frontend.tools.mistral import MistralParser
from octavo.frontend.tools.parser import ToolParser
from octavo.frontend.tools.pythonic import PythonicParser
from octavo.protocol.errors import ConfigError

Parser = TypeVar("Parser", bound=type[ToolParser])


_parsers: dict[str, type[ToolParser]] = {
    "cohere_command3": json_formats.CohereParser,
    "cohere_command4": json_formats.CohereParser,
    "deepseek_v3": json_formats.DeepseekV3Parser,
    "deepseek_v31": json_formats.DeepseekV31Parser,
    "dots": xml_formats.DotsParser,
    "ernie45": json_formats.Ernie45Parser,
    "functiongemma": gemma_calls.FunctionGemmaParser,
    "gemma4": gemma_calls.Gemma4Parser,
    "glm45": xml_formats.Glm45Parser,
    "glm47": xml_formats.Glm47Parser,
    "granite": json_formats.GraniteParser,
    "granite-20b-fc": json_formats.Granite20bParser,
    "granite4": json_formats.HermesParser,
    "hermes": json_formats.HermesParser,
    "hunyuan_a13b": json_formats.HunyuanA13bParser,
    "internlm": json_formats.InternLmParser,
    "jamba": json_formats.JambaParser,
    "kimi_k2": json_formats.KimiK2Parser,
    "lfm2": python_marked.Lfm2Parser,
    "ling3": xml_formats.Glm45Parser,
    "llama3_json": Llama3JsonParser,
    "llama4_json": Llama3JsonParser,
    "llama4_pythonic": PythonicParser,
    "longcat": LongcatParser,
    "mimo": xml_formats.MimoParser,
    "minimax_m2": xml_formats.MinimaxM2Parser,
    "mistral": MistralParser,
    "olmo3": python_marked.Olmo3Parser,
    "openai": HarmonyParser,
    "phi4_mini_json": json_formats.Phi4MiniParser,
    "poolside_v1": xml_formats.Glm45Parser,
    "pythonic": PythonicParser,
    "qwen3_coder": xml_formats.Qwen3XmlParser,
    "qwen3_json": json_formats.HermesParser,
    "qwen3_xml": xml_formats.Qwen3XmlParser,
    "seed_oss": xml_formats.SeedOssParser,
    "step3": xml_formats.Step3Parser,
    "step3p5": xml_formats.Qwen3XmlParser,
    "xlam": json_formats.XlamParser,
}


def register_tool_parser(name: str) -> Callable[[Parser], Parser]:
    """Register a `ToolParser` under a name for `--tool-call-parser`; an existing name is replaced."""

    def register(parser: Parser) -> Parser:
        _parsers[name] = parser
        return parser

    return register


def parser_names() -> list[str]:
    """Return the names of all parsers."""
    return sorted(_parsers)


def tool_parser(name: str) -> type[ToolParser]:
    """Return the parser with this name.

    Raises:
        ConfigError: no parser has this name.
    """
    if name not in _parsers:
        raise ConfigError(
            f"unknown tool parser {name!r}",
            hint=f"--tool-call-parser is one of {', '.join(parser_names())}, or what --tool-parser-plugin registers",
        )
    return _parsers[name]
