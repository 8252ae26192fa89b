"""`PluginFormat`: outputs that are parsed by plugins, alone or together with one of octavo's parsers."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.frontend.plugins.adapters import PluginReasoning, PluginToolParser
from octavo.frontend.plugins.reader import CallStage, PluginReader
from octavo.frontend.plugins.reasoning_reader import PluginReasoningReader, ReasoningStage
from octavo.frontend.plugins.tokenizer import PluginTokenizer
from octavo.frontend.plugins.tool_reader import PluginToolReader
from octavo.frontend.plugins.vllm_types import ChatCompletionRequest
from octavo.frontend.reasoning.parser import TagTokenizer
from octavo.frontend.tools.answer import AnswerFormat


@dataclass(frozen=True, slots=True)
class PluginFormat:
    """How the outputs of one request are parsed."""

    format: AnswerFormat
    """The parsers; at least one of them is a plugin's."""
    request: ChatCompletionRequest
    """The request in the form that plugins see."""
    tokenizer: PluginTokenizer
    prompt_token_ids: Sequence[int]

    @property
    def separates_reasoning(self) -> bool:
        """Whether reasoning is separated from the content."""
        return self.format.separates_reasoning

    @property
    def shows_special_tokens(self) -> bool:
        """Whether a plugin needs special tokens in the text."""
        return not self.request.skip_special_tokens

    def open(self) -> PluginReader:
        """Return a reader of one output."""
        reasoning, tools = self.format.reasoning, self.format.tools
        stage: ReasoningStage | None = None
        if isinstance(reasoning, PluginReasoning):
            parser = reasoning.make(self.tokenizer, self.request.chat_template_kwargs or {})
            stage = PluginReasoningReader(parser, self.request, self.prompt_token_ids)
        elif reasoning is not None:
            stage = AnswerFormat(reasoning, self.format.initial_state).open()
        calls: CallStage = AnswerFormat(tools=tools, max_calls=self.format.max_calls).open()
        if isinstance(tools, PluginToolParser):
            made = tools.make(self.tokenizer, self.request)
            calls = PluginToolReader(made, self.request, self.format.max_calls)
        return PluginReader(stage, calls, self.tokenizer)

    def num_reasoning_tokens(self, token_ids: Sequence[int], tokenizer: TagTokenizer) -> int:
        """Return the number of generated tokens that are reasoning."""
        reasoning = self.format.reasoning
        if not isinstance(reasoning, PluginReasoning):
            return self.format.num_reasoning_tokens(token_ids, tokenizer)
        parser = reasoning.make(self.tokenizer, self.request.chat_template_kwargs or {})
        return (
            int(parser.call("count_reasoning_tokens", list(token_ids))) if parser.has("count_reasoning_tokens") else 0
        )
