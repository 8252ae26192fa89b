"""Adapts the parsers of vLLM plugins to the interfaces by which a server selects parsers."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from octavo.frontend.plugins.calls import PluginObject
from octavo.frontend.plugins.tokenizer import PluginTokenizer, plugin_tokenizer
from octavo.frontend.plugins.vllm_types import ChatCompletionRequest
from octavo.frontend.reasoning.parser import ReasoningParser, TagTokenizer
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.frontend.tools.parser import Parsed, ToolParser


class PluginToolParser(ToolParser):
    """Represents a plugin's tool parser in the registry; `PluginReader` calls the plugin itself."""

    name: ClassVar[str]
    plugin: ClassVar[type]

    @classmethod
    def of(cls, name: str, plugin: type) -> "type[PluginToolParser]":
        """Return the adapter class for a plugin's class."""
        return type(plugin.__name__, (cls,), {"name": name, "plugin": plugin})

    def make(self, tokenizer: PluginTokenizer, request: ChatCompletionRequest) -> PluginObject:
        """Create a parser for one output."""
        return PluginObject(self.name, self.plugin, tokenizer, request.tools)

    def parse(self, text: str, is_final: bool) -> Parsed:
        """Raise an error: a plugin needs the request and its tokens."""
        raise NotImplementedError("parsers of plugins read outputs with a PluginReader")


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginReasoning(ReasoningParser):
    """A plugin's reasoning parser.

    Its marks determine where constraints and limits begin and how prompts open the reasoning. `PluginReader` calls the
    plugin itself.
    """

    name: str
    plugin: type

    @classmethod
    def of(cls, name: str, plugin: type) -> "PluginReasoning":
        """Return the adapter for a plugin's class; its marks are known once there is a tokenizer."""
        return cls(name=name, plugin=plugin, begins=(), ends=(), opening="", closing="")

    def for_tokenizer(self, tokenizer: TagTokenizer) -> "PluginReasoning":
        """Return the parser with the marks that the plugin names for this tokenizer."""
        assert isinstance(tokenizer, Tokenizer)
        parser = self.make(plugin_tokenizer(tokenizer), {})
        begin, end = parser.attribute("reasoning_start_str"), parser.attribute("reasoning_end_str")
        return replace(
            self,
            begins=(begin,) if begin else (),
            ends=(end,) if end else (),
            opening=f"{begin or ''}\n",
            closing=f"{end or ''}\n\n",
        )

    def make(self, tokenizer: PluginTokenizer, variables: dict[str, Any]) -> PluginObject:
        """Create a parser for one output.

        Args:
            tokenizer: tokenizer of the model.
            variables: variables of the chat template.
        """
        return PluginObject(self.name, self.plugin, tokenizer, chat_template_kwargs=variables)
