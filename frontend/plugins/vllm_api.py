"""The base classes and registries that parsers written for vLLM import."""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from octavo.frontend.plugins.vllm_types import DeltaMessage

Parser = TypeVar("Parser", bound=type)

Tool = Any
"""A tool of a request."""


class ToolParser:
    """Base class of tool parsers, which implement `extract_tool_calls` and `extract_tool_calls_streaming`.

    Args:
        tokenizer: tokenizer of the model.
        tools: tools of the request.
    """

    supports_required_and_named = True

    def __init__(self, tokenizer: Any, tools: Sequence[Any] | None = None) -> None:
        self.prev_tool_call_arr: list[dict[str, Any]] = []
        self.current_tool_id = -1
        self.current_tool_name_sent = False
        self.streamed_args_for_tool: list[str] = []
        self.model_tokenizer = tokenizer
        self.tools = list(tools or ())

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token ids by token string."""
        vocabulary: dict[str, int] = self.model_tokenizer.get_vocab()
        return vocabulary

    def adjust_request(self, request: Any) -> Any:
        """Return the request with changes; octavo applies a change of `skip_special_tokens`."""
        return request

    def get_remaining_unstreamed_args(self) -> str:
        """Return arguments of the last call that were parsed but not yet returned."""
        if not self.prev_tool_call_arr:
            return ""
        index = len(self.prev_tool_call_arr) - 1
        arguments = self.prev_tool_call_arr[index].get("arguments", {})
        parsed = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        sent = self.streamed_args_for_tool[index] if index < len(self.streamed_args_for_tool) else ""
        return parsed.removeprefix(sent) if parsed.startswith(sent) else ""


_OLDER_NAMES = {
    "extract_reasoning_content": "extract_reasoning",
    "extract_reasoning_content_streaming": "extract_reasoning_streaming",
}
"""Method names before vLLM 0.12, mapped to the current ones."""


class ReasoningParser:
    """Base class of reasoning parsers, which implement `extract_reasoning` and `extract_reasoning_streaming`.

    Args:
        tokenizer: tokenizer of the model.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for older, name in _OLDER_NAMES.items():
            if older in vars(cls) and name not in vars(cls):
                setattr(cls, name, vars(cls)[older])

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        self.model_tokenizer = tokenizer

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token ids by token string."""
        vocabulary: dict[str, int] = self.model_tokenizer.get_vocab()
        return vocabulary

    @property
    def reasoning_start_str(self) -> str | None:
        """Text that opens the reasoning. `None` if there is none."""
        return None

    @property
    def reasoning_end_str(self) -> str | None:
        """Text that ends the reasoning. `None` if there is none."""
        return None

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Return whether the reasoning has ended within these tokens; parsers that work on text return `False`."""
        return False

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        """Return whether the reasoning has ended; `delta_ids` are the latest tokens."""
        return self.is_reasoning_end(input_ids)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """Return the tokens after the reasoning. octavo does not call it."""
        return []

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Return the number of generated tokens that are reasoning."""
        return 0


class BaseThinkingReasoningParser(ReasoningParser):
    """Base class of reasoning parsers with two mark tokens; subclasses define `start_token` and `end_token`."""

    start_token: Any = None
    end_token: Any = None

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        start, end = self.vocab.get(self.start_token), self.vocab.get(self.end_token)
        if start is None or end is None:
            raise RuntimeError(f"{type(self).__name__}: {self.start_token!r} or {self.end_token!r} is no token")
        self.start_token_id, self.end_token_id = start, end

    @property
    def reasoning_start_str(self) -> str | None:
        """Text that opens the reasoning."""
        text: str = self.start_token
        return text

    @property
    def reasoning_end_str(self) -> str | None:
        """Text that ends the reasoning."""
        text: str = self.end_token
        return text

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Return whether the last mark is the closing one."""
        marks = (self.start_token_id, self.end_token_id)
        return next((token_id == self.end_token_id for token_id in reversed(input_ids) if token_id in marks), False)

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        """Return whether the closing mark is among the latest tokens."""
        return self.end_token_id in delta_ids

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """Return the tokens after the closing mark."""
        return input_ids[input_ids.index(self.end_token_id) + 1 :] if self.end_token_id in input_ids else []

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Return the number of tokens between the marks, or before the closing mark."""
        ids = list(token_ids)
        end = ids.index(self.end_token_id) if self.end_token_id in ids else len(ids)
        return end - (ids.index(self.start_token_id) + 1 if self.start_token_id in ids[:end] else 0)

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """Return the texts before and after the closing mark; without that mark, all is reasoning."""
        before, mark, after = model_output.partition(self.start_token)
        reasoning, _, content = (after if mark else before).partition(self.end_token)
        return reasoning, content or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """Return what is new in a stream. Without an opening mark, text is content, as in vLLM."""
        if len(delta_token_ids) == 1 and delta_token_ids[0] in (self.start_token_id, self.end_token_id):
            return None
        if self.start_token_id not in current_token_ids or self.end_token_id in previous_token_ids:
            return DeltaMessage(content=delta_text)
        if self.start_token_id in delta_token_ids:
            delta_text = delta_text.partition(self.start_token)[2]
        reasoning, _, content = delta_text.partition(self.end_token)
        return DeltaMessage(reasoning=reasoning, content=content or None)


class DeepSeekR1ReasoningParser(BaseThinkingReasoningParser):
    """`<think>` and `</think>`; the opening mark may be missing."""

    start_token = "<think>"
    end_token = "</think>"

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """Return what is new in a stream. Without an opening mark, text is reasoning."""
        ids = (previous_token_ids, current_token_ids, delta_token_ids)
        delta = super().extract_reasoning_streaming(previous_text, current_text, delta_text, *ids)
        if delta is None or self.start_token_id in current_token_ids or self.end_token_id in previous_token_ids:
            return delta
        reasoning, _, content = delta_text.partition(self.end_token)
        return DeltaMessage(reasoning=reasoning, content=content or None)


class _Manager:
    """Parsers by name."""

    found: ClassVar[dict[str, type]]
    lazy: ClassVar[dict[str, tuple[str, str]]]

    @classmethod
    def register_module(
        cls, name: str | list[str] | None = None, force: bool = True, module: type | None = None
    ) -> Any:
        """Register a class, or return a decorator that does."""

        def register(parser: Parser) -> Parser:
            for one in [parser.__name__] if name is None else [name] if isinstance(name, str) else name:
                if not force and one in cls.found:
                    raise KeyError(f"{one} is already registered")
                cls.found[one] = parser
            return parser

        decorator: Callable[[type], type] = register
        return decorator if module is None else register(module)

    @classmethod
    def register_lazy_module(cls, name: str, module_path: str, class_name: str) -> None:
        """Register a class by name; it is looked up in the plugin's own file first."""
        cls.lazy[name] = (module_path, class_name)


class ToolParserManager(_Manager):
    """Tool parsers by name."""

    found: ClassVar[dict[str, type]] = {}
    lazy: ClassVar[dict[str, tuple[str, str]]] = {}


class ReasoningParserManager(_Manager):
    """Reasoning parsers by name."""

    found: ClassVar[dict[str, type]] = {}
    lazy: ClassVar[dict[str, tuple[str, str]]] = {}
