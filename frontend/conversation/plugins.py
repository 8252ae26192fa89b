"""The request in the form that plugins see, and the output format that uses the plugins' parsers."""

from collections.abc import Sequence

from octavo.frontend.conversation.request import ChatRequest
from octavo.frontend.plugins.adapters import PluginReasoning, PluginToolParser
from octavo.frontend.plugins.format import PluginFormat
from octavo.frontend.plugins.tokenizer import plugin_tokenizer
from octavo.frontend.plugins.vllm_types import ChatCompletionRequest, ChatCompletionToolsParam, FunctionDefinition
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.frontend.tools.answer import AnswerFormat


def plugin_format(
    answer: AnswerFormat, request: ChatRequest, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]
) -> PluginFormat | None:
    """Return the output format of a request; `None` if no parser comes from a plugin.

    Raises:
        RequestFailedError: a plugin's code raised an error.
    """
    if not isinstance(answer.reasoning, PluginReasoning) and not isinstance(answer.tools, PluginToolParser):
        return None
    shown = _shown(request, calls=answer.tools is not None)
    plugin = plugin_tokenizer(tokenizer)
    if isinstance(answer.tools, PluginToolParser):
        shown = answer.tools.make(plugin, shown).call("adjust_request", shown)
    return PluginFormat(answer, shown, plugin, prompt_token_ids)


def _shown(request: ChatRequest, *, calls: bool) -> ChatCompletionRequest:
    functions = [
        FunctionDefinition(
            name=tool.name,
            description=tool.description,
            parameters=None if tool.parameters is None else dict(tool.parameters),
            strict=tool.is_strict,
        )
        for tool in request.input.tools
    ]
    return ChatCompletionRequest(
        messages=list(request.input.messages),
        tools=[ChatCompletionToolsParam(function=function) for function in functions] or None,
        tool_choice="auto" if calls else "none",
        parallel_tool_calls=request.allows_parallel_calls,
        include_reasoning=request.shows_reasoning,
        chat_template_kwargs=dict(request.input.variables),
    )
