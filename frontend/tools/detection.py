"""Detects the tool parser for a chat template by the marks in the template."""

import re

MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>commentary", "<|start|>assistant")),
    ("kimi_k2", ("<|tool_call_argument_begin|>",)),
    ("step3", ("<steptml:invoke",)),
    ("dots", ("<dots_function_call>",)),
    ("minimax_m2", ("<minimax:tool_call>", "<invoke name=")),
    ("seed_oss", ("<seed:tool_call>", "<function=")),
    ("longcat", ("<longcat_tool_call>",)),
    ("glm47", ("<tool_call>", "</arg_key><arg_value>")),
    ("glm45", ("<tool_call>", "<arg_key>", "<arg_value>")),
    ("mimo", ("<tool_call>", "<function=", "<parameter=example_parameter_1>value_1</parameter>")),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>")),
    ("gemma4", ("<|tool_call>call:",)),
    ("functiongemma", ("<start_function_call>call:",)),
    ("cohere_command3", ("<|START_ACTION|>", "tool_name")),
    ("internlm", ("<|action_start|><|plugin|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("phi4_mini_json", ("functools[", "<|end|>")),
    ("phi4_mini_json", ("<|tool_call|>", "<|/tool_call|>")),
    ("olmo3", ("<function_calls>", "<functions>")),
    ("granite-20b-fc", ("<function_call>", "<function_response>")),
    ("granite", ("<|tool_call|>", "<|start_of_role|>")),
    ("hunyuan_a13b", ("<tool_calls>", "<|extra_0|>")),
    ("jamba", ("<tool_calls>[", "</tool_calls>")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>", "</tool_call>", '"arguments"')),
    ("xlam", ("xLAM", "make calls in a single JSON array")),
    ("llama4_json", ("<|header_start|>", '"parameters": ')),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|start_header_id|>", '"parameters": ')),
)
"""Parsers, each with marks that all templates of its models contain. The first match wins."""

_ESCAPED_QUOTE = re.compile(r"""\\(["'])""")


def detect_tool_parser(template: str) -> str | None:
    """Return the name of the parser for the calls that a template writes; `None` if the template has no known format.

    Args:
        template: the source of a chat template that supports tools.
    """
    text = _ESCAPED_QUOTE.sub(r"\1", template)
    if "tools" not in text:
        return None
    return next((name for name, marks in MARKS if all(mark in text for mark in marks)), None)
