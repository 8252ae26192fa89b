"""Plugins written for vLLM."""

OLD_TOOLS = '''
import json
from collections.abc import Sequence

from vllm.entrypoints.openai.protocol import (
    ChatCompletionRequest, DeltaFunctionCall, DeltaMessage, DeltaToolCall, ExtractedToolCallInformation, FunctionCall,
    ToolCall,
)
from vllm.entrypoints.openai.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager
from vllm.logger import init_logger
from vllm.transformers_utils.tokenizer import AnyTokenizer

logger = init_logger(__name__)


@ToolParserManager.register_module(["shriek", "yell"])
class ShoutParser(ToolParser):
    """Calls of the form NAME!{...}."""

    def __init__(self, tokenizer: AnyTokenizer):
        super().__init__(tokenizer)
        assert self.vocab and self.model_tokenizer.encode("a", add_special_tokens=False)

    def adjust_request(self, request):
        request.skip_special_tokens = False
        return request

    def extract_tool_calls(self, model_output: str, request: ChatCompletionRequest) -> ExtractedToolCallInformation:
        before, mark, arguments = model_output.partition("!")
        content, _, name = before.rpartition(" ")
        if not mark or name not in [tool.function.name for tool in request.tools]:
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        call = ToolCall(type="function", function=FunctionCall(name=name, arguments=arguments))
        return ExtractedToolCallInformation(tools_called=True, tool_calls=[call], content=content or None)

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str, previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int], delta_token_ids: Sequence[int], request: ChatCompletionRequest,
    ) -> DeltaMessage | None:
        assert current_text == previous_text + delta_text
        assert list(current_token_ids) == [*previous_token_ids, *delta_token_ids]
        assert self.model_tokenizer.decode(current_token_ids, skip_special_tokens=True).endswith(current_text[-1:])
        before, mark, arguments = current_text.partition("!")
        content, _, name = before.rpartition(" ")
        if not mark:
            return None
        if not self.current_tool_name_sent:
            self.current_tool_name_sent = True
            function = DeltaFunctionCall(name=name).model_dump(exclude_none=True)
            return DeltaMessage(tool_calls=[DeltaToolCall(index=0, type="function", id="call_1", function=function)])
        if "boom" in delta_text:
            raise KeyError("boom")
        function = DeltaFunctionCall(arguments=delta_text).model_dump(exclude_none=True)
        return DeltaMessage(tool_calls=[DeltaToolCall(index=0, function=function)])
'''
