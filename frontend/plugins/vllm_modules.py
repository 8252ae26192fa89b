"""Stand-ins for the modules of vLLM from which its plugins import: there while a plugin is loaded, if vLLM is not."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from octavo.frontend.plugins import vllm_api, vllm_functions, vllm_types
from octavo.frontend.tools.call_id import new_call_id
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.structured import StructuredOutputsParams

_TYPES = {name: value for name, value in vars(vllm_types).items() if isinstance(value, type)}
_TOOLS = {"ToolParser": vllm_api.ToolParser, "ToolParserManager": vllm_api.ToolParserManager, "Tool": Any}
_REASONING = {
    "ReasoningParser": vllm_api.ReasoningParser,
    "ReasoningParserManager": vllm_api.ReasoningParserManager,
    "BaseThinkingReasoningParser": vllm_api.BaseThinkingReasoningParser,
    "DeepSeekR1ReasoningParser": vllm_api.DeepSeekR1ReasoningParser,
}
_TOOL_TEXTS = {
    "is_complete_json": vllm_functions.is_complete_json,
    "find_common_prefix": vllm_functions.find_common_prefix,
    "partial_tag_overlap": vllm_functions.partial_tag_overlap,
    "consume_space": vllm_functions.consume_space,
    "coerce_to_schema_type": vllm_functions.coerce_to_schema_type,
    "extract_types_from_schema": vllm_functions.extract_types_from_schema,
    "find_tool_name": vllm_functions.find_tool_name,
    "find_tool_properties": vllm_functions.find_tool_properties,
    "safe_literal_eval": ast.literal_eval,
}
_CALL_IDS = {"make_tool_call_id": vllm_functions.make_tool_call_id, "random_tool_call_id": new_call_id}
_TOKENIZERS = {"TokenizerLike": vllm_functions.TokenizerLike, "AnyTokenizer": vllm_functions.TokenizerLike}
_VALUES = {"is_list_of": vllm_functions.is_list_of, "random_uuid": vllm_functions.random_uuid}

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
    "vllm.exceptions": {"VLLMValidationError": InvalidRequestError},
    "vllm.logger": {"init_logger": vllm_functions.init_plugin_logger},
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
    "vllm.utils.mistral": {"is_mistral_tokenizer": vllm_functions.is_mistral_tokenizer},
}
"""What each module has, by its name in one of vLLM's releases since 0.8."""


def has_vllm() -> bool:
    """Return whether vLLM itself is installed; its plugins then import from it.

    A folder of this name on the path is not vLLM, nor are the modules of `octavo.compat.vllm` under its name.
    """
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None


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
    hidden = {path: module for path, module in sys.modules.items() if path.partition(".")[0] == "vllm"}
    sys.modules.update(made)
    try:
        yield
    finally:
        for path in made:
            del sys.modules[path]
        sys.modules.update(hidden)
