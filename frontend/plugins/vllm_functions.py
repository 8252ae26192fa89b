"""Small functions of vLLM's modules, for plugins and for `octavo.compat.vllm`."""

import ast
import json
import logging
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from octavo.frontend.tools.bare_value import json_value, kinds_of_schema
from octavo.frontend.tools.call_id import new_call_id

PLUGIN = "octavo_plugin"
"""Prefix of the module names of plugins."""

safe_literal_eval = ast.literal_eval


class TokenizerLike(Protocol):
    """Methods that every tokenizer of a model has."""

    def get_vocab(self) -> dict[str, int]:
        """Return token ids by token string."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        """Return the text of tokens."""


_logged: set[tuple[str, int, str, tuple[str, ...]]] = set()
"""Messages that were logged once: logger, level, message and arguments."""


def _log_once(logger: logging.Logger, level: int, message: str, *args: object, scope: str = "process") -> None:
    """Log a message unless it was logged before. `scope`, which selects the logging ranks in vLLM, is ignored."""
    key = (logger.name, level, message, tuple(map(str, args)))
    if key not in _logged:
        _logged.add(key)
        logger.log(level, message, *args, stacklevel=2)


def init_logger(name: str) -> logging.Logger:
    """Return the logger of a module, which also has `debug_once`, `info_once` and `warning_once`."""
    # Plugins log to the same place as octavo.
    logger = logging.getLogger(f"octavo.{name}" if name.startswith(PLUGIN) else name)
    for level in (logging.DEBUG, logging.INFO, logging.WARNING):
        setattr(logger, f"{logging.getLevelName(level).lower()}_once", partial(_log_once, logger, level))
    return logger


def random_uuid() -> str:
    """Return 32 random hexadecimal digits."""
    return uuid.uuid4().hex


def is_mistral_tokenizer(tokenizer: object) -> bool:
    """Return False: octavo reads Mistral's tokenizers without Mistral's library."""
    return False


def is_list_of(value: object, kind: Any, *, check: str = "first") -> bool:
    """Return whether a value is a list of objects of a type."""
    return isinstance(value, list) and all(isinstance(one, kind) for one in value)


def make_tool_call_id(id_type: str = "random", func_name: str | None = None, idx: int | None = None) -> str:
    """Return an id for a call: Kimi's format contains the function's name, other ids are random."""
    return f"functions.{func_name}:{idx}" if id_type == "kimi_k2" else new_call_id()


def extract_types_from_schema(schema: object) -> list[str]:
    """Return the JSON types that a schema allows; without a type, it counts as a string."""
    return sorted(kinds_of_schema(schema)) or ["string"]


def coerce_to_schema_type(value: str, schema_type: str | list[str]) -> Any:
    """Convert bare text to a value of one of these JSON types; return the text if it fits none of them."""
    return json.loads(json_value(value, {"type": schema_type}))


def find_tool_name(tools: Sequence[Any] | None, tool_name: str) -> bool:
    """Return whether a request offers a function of this name."""
    return any(tool.function.name == tool_name for tool in tools or ())


def find_tool_properties(tools: Sequence[Any] | None, tool_name: str) -> dict[str, Any]:
    """Return the schemas of a function's arguments by name; empty if there is no such function."""
    schemas = (tool.function.parameters or {} for tool in tools or () if tool.function.name == tool_name)
    return dict(next(schemas, {}).get("properties", {}))


def is_complete_json(text: str) -> bool:
    """Return whether a text is JSON."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def find_common_prefix(one: str, other: str) -> str:
    """Return the longest common prefix."""
    length = next((n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return one[: min(len(one), len(other)) if length is None else length]


def partial_tag_overlap(text: str, tag: str) -> int:
    """Return the length of the longest suffix of a text that is a prefix of a tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def consume_space(position: int, text: str) -> int:
    """Return the position of the next character that is not white space."""
    return len(text) - len(text[position:].lstrip())
