"""Stand-ins for the modules of vLLM from which its plugins import: there while a plugin is loaded, if vLLM is not."""

import ast
import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from octavo.frontend.plugins import vllm_api, vllm_types
from octavo.frontend.plugins.tokenizer import PluginTokenizer
from octavo.frontend.tools.call_id import new_call_id
from octavo.protocol.structured import StructuredOutputsParams


def make_tool_call_id(id_type: str = "random", func_name: str | None = None, idx: int | None = None) -> str:
    """Return an id of a call: Kimi's form names the function, others are random."""
    return f"functions.{func_name}:{idx}" if id_type == "kimi_k2" else new_call_id()


def is_complete_json(text: str) -> bool:
    """Return whether a text is JSON."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def find_common_prefix(one: str, other: str) -> str:
    """Return the longest text that both begin with."""
    length = next((n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return one[: min(len(one), len(other)) if length is None else length]


def partial_tag_overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of a text begin a tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def consume_space(position: int, text: str) -> int:
    """Return the position of the next character that is not white space."""
    return len(text) - len(text[position:].lstrip())


_TYPES = {name: value for name, value in vars(vllm_types).items() if isinstance(value, type)}
_TOOLS = {"ToolParser": vllm_api.ToolParser, "ToolParserManager": vllm_api.ToolParserManager, "Tool": Any}
_REASONING = {
    name: getattr(vllm_api, name)
    for name in (
        *("ReasoningParser", "ReasoningParserManager", "BaseThinkingReasoningParser", "DeepSeekR1ReasoningParser"),
    )
}
_TOOL_TEXTS = {
    function.__name__: function
    for function in (is_complete_json, find_common_prefix, partial_tag_overlap, consume_space)
} | {"safe_literal_eval": ast.literal_eval}
_CALL_IDS = {"make_tool_call_id": make_tool_call_id, "random_tool_call_id": new_call_id}
_TOKENIZERS = {"TokenizerLike": PluginTokenizer, "AnyTokenizer": PluginTokenizer}
_VALUES = {"is_list_of": vllm_api.is_list_of, "random_uuid": new_call_id}

MODULES: dict[str, dict[str, Any]] = {
    "vllm.entrypoints.chat_utils": _CALL_IDS,
    "vllm.entrypoints.generate.base.protocol": _TYPES,
    "vllm.entrypoints.openai.chat_completion.protocol": _TYPES,
    "vllm.entrypoints.openai.engine.protocol": _TYPES,
    "vllm.entrypoints.openai.protocol": _TYPES,
    "vllm.entrypoints.openai.responses.protocol": _TYPES,
    "vllm.entrypoints.openai.tool_parsers": _TOOLS,
    "vllm.entrypoints.openai.tool_parsers.abstract_tool_parser": {**_TYPES, **_TOOLS},
    "vllm.entrypoints.openai.tool_parsers.utils": _TOOL_TEXTS,
    "vllm.logger": {"init_logger": vllm_api.init_logger},
    "vllm.reasoning": _REASONING,
    "vllm.reasoning.abs_reasoning_parsers": {**_TYPES, **_REASONING},
    "vllm.reasoning.basic_parsers": {**_TYPES, **_REASONING},
    "vllm.reasoning.deepseek_r1_reasoning_parser": _REASONING,
    "vllm.renderers.chat_utils": _CALL_IDS,
    "vllm.sampling_params": {"StructuredOutputsParams": StructuredOutputsParams},
    "vllm.tokenizers": _TOKENIZERS,
    "vllm.tool_parsers": _TOOLS,
    "vllm.tool_parsers.abstract_tool_parser": {**_TYPES, **_TOOLS},
    "vllm.tool_parsers.utils": _TOOL_TEXTS,
    "vllm.transformers_utils.tokenizer": _TOKENIZERS,
    "vllm.utils": _VALUES,
    "vllm.utils.collection_utils": _VALUES,
}
"""What each module has, by its name in one of vLLM's releases since 0.8."""


def has_vllm() -> bool:
    """Return whether vLLM itself is installed; its plugins then import from it."""
    return "vllm" in sys.modules or importlib.util.find_spec("vllm") is not None


@contextmanager
def vllm_modules() -> Iterator[None]:
    """Let `import vllm...` find the stand-ins, and with them their packages."""
    made: dict[str, ModuleType] = {}
    for name in MODULES:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            module = made.setdefault(path, ModuleType(path))
            module.__path__ = []  # a package, whose further modules do not exist
            if length > 1:
                setattr(made[".".join(parts[: length - 1])], parts[length - 1], module)
        vars(made[name]).update(MODULES[name])
    sys.modules.update(made)
    try:
        yield
    finally:
        for path in made:
            del sys.modules[path]
