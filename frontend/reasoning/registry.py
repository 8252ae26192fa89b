"""Reasoning parsers by name: how each family of models marks its reasoning. docs/reasoning.md lists what was tested."""

from octavo.frontend.harmony.parser import HARMONY_REASONING
from octavo.frontend.reasoning.parser import ReasoningParser, ReasoningState
from octavo.protocol.errors import ConfigError

_INSIDE = ReasoningState.INSIDE
_QWEN_CALL = ("\n<tool_call>",)

_parsers = {
    "deepseek_r1": ReasoningParser(default=_INSIDE),
    "deepseek_v3": ReasoningParser(thinks_by_default=False),
    "ernie45": ReasoningParser(default=_INSIDE, call_marks=_QWEN_CALL, wrapper=("<response>", "</response>")),
    "glm45": ReasoningParser(call_marks=_QWEN_CALL, opening="\n<think>", closing="</think>\n"),
    "granite": ReasoningParser(
        begins=("Here is my thought process:", "Here's my thought process:"),
        ends=("Here is my response:", "Here's my response:"),
        thinks_by_default=False,
        gap=" \t\r\n",
        opening="Here is my thought process:",
        closing="Here is my response: ",
    ),
    "hunyuan_a13b": ReasoningParser(wrapper=("<answer>", "</answer>"), closing="\n</think>\n"),
    "kimi_k2": ReasoningParser(default=_INSIDE, call_marks=("<|tool_calls_section_begin|>",), closing="</think>"),
    "minimax_m2": ReasoningParser(default=_INSIDE, call_marks=("\n<minimax:tool_call>",)),
    "mistral": ReasoningParser(
        begins=("[THINK]",),
        ends=("[/THINK]",),
        call_marks=("[TOOL_CALLS]",),
        opening="[THINK]",
        closing="[/THINK]",
        without_tokens=ReasoningParser(call_marks=("[TOOL_CALLS]",)),
    ),
    "nemotron_v3": ReasoningParser(call_marks=_QWEN_CALL),
    "olmo3": ReasoningParser(opening="<think>"),
    "openai_gptoss": HARMONY_REASONING,
    "qwen3": ReasoningParser(call_marks=_QWEN_CALL),
    "seed_oss": ReasoningParser(
        begins=("<seed:think>",),
        ends=("</seed:think>",),
        default=_INSIDE,
        call_marks=("\n<seed:tool_call>",),
        opening="<seed:think>",
        closing="</seed:think>\n",
    ),
    "step3": ReasoningParser(default=_INSIDE, call_marks=("<\uff5ctool_calls_begin\uff5c>",)),
    "step3p5": ReasoningParser(default=_INSIDE, call_marks=_QWEN_CALL),
}

_aliases = {
    "glm47": "glm45",
    "hunyuan": "hunyuan_a13b",
    "mimo": "qwen3",
    "nemotron": "nemotron_v3",
    "openai": "openai_gptoss",
}


def register_reasoning_parser(name: str, parser: ReasoningParser) -> None:
    """Register a parser for `--reasoning-parser NAME`; an existing name is replaced."""
    _aliases.pop(name, None)
    _parsers[name] = parser


def reasoning_parser(name: str) -> ReasoningParser:
    """Return the parser with this name.

    Raises:
        ConfigError: no parser has this name.
    """
    parser = _parsers.get(_aliases.get(name, name))
    if parser is None:
        raise ConfigError(
            f"unknown reasoning parser {name!r}",
            hint=f"--reasoning-parser is one of {', '.join(reasoning_parser_names())}, or what "
            "--reasoning-parser-plugin registers",
        )
    return parser


def reasoning_parser_names() -> list[str]:
    """Return the names of all parsers, sorted."""
    return sorted({*_parsers, *_aliases})
