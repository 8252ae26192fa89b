"""Plugins with parsers: octavo's own, and those written for vLLM, run unchanged through chat completions."""

import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from http_client import events, post
from plugin_files import OLD_TOOLS
from tool_answers import PATH, QWEN, TOOLS, ToolClient, add_up, ask, both_ways, weather

from octavo.compat.vllm.names import NAMES
from octavo.frontend.conversation.settings import ChatSettings
from octavo.frontend.plugins.loading import load_plugin
from octavo.frontend.plugins.vllm_functions import (
    coerce_to_schema_type,
    extract_types_from_schema,
    find_tool_name,
    find_tool_properties,
)
from octavo.frontend.plugins.vllm_modules import vllm_modules
from octavo.frontend.plugins.vllm_types import ChatCompletionRequest
from octavo.frontend.reasoning.registry import reasoning_parser
from octavo.frontend.tools.registry import tool_parser
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import ConfigError

NEW_REASONING = '''
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.engine.protocol import DeltaMessage
from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.tokenizers import TokenizerLike


class HashParser(ReasoningParser):
    """Reasoning up to a number sign."""

    def __init__(self, tokenizer: TokenizerLike, *args, chat_template_kwargs=None, **kwargs):
        super().__init__(tokenizer, *args, **kwargs)
        self.end_id = self.vocab["#"]

    @property
    def reasoning_end_str(self):
        return "#"

    def is_reasoning_end(self, input_ids):
        return self.end_id in input_ids

    def extract_content_ids(self, input_ids):
        return input_ids[input_ids.index(self.end_id) + 1:]

    def count_reasoning_tokens(self, token_ids):
        return list(token_ids).index(self.end_id) if self.end_id in token_ids else len(token_ids)

    def extract_reasoning(self, model_output: str, request: ChatCompletionRequest):
        reasoning, _, content = model_output.partition("#")
        return reasoning or None, content or None

    def extract_reasoning_streaming(
        self, previous_text, current_text, delta_text, previous_token_ids, current_token_ids, delta_token_ids
    ):
        if delta_text == "#":
            return None
        reasoning, _, content = delta_text.partition("#")
        return DeltaMessage(reasoning=reasoning, content=content)


ReasoningParserManager.register_lazy_module("hash", "vllm.reasoning.hash_reasoning_parser", "HashParser")
'''
OLD_REASONING = (
    NEW_REASONING.replace("extract_reasoning", "extract_reasoning_content")
    .replace("openai.chat_completion.protocol", "openai.protocol")
    .replace("openai.engine.protocol", "openai.protocol")
    .replace("reasoning=reasoning", "reasoning_content=reasoning")
)
THINK = """
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.reasoning import ReasoningParserManager

@ReasoningParserManager.register_module("think")
class ThinkParser(BaseThinkingReasoningParser):
    start_token, end_token = "<think>", "</think>"
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Any:
    def write(text: str, name: str = "plugin.py") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


@pytest.fixture
def tools(plugin: Any) -> ServerConfig:
    return ServerConfig(
        enable_auto_tool_choice=True, tool_call_parser="shriek", tool_parser_plugin=plugin(OLD_TOOLS, "shriek.py")
    )


def test_a_tool_parser_for_vllm(tools: ServerConfig) -> None:
    choice = both_ways('weather!{"city": "Ulm"}', ask(tools=TOOLS), tools)
    assert (choice["message"]["tool_calls"], choice["finish_reason"]) == ([weather("Ulm")], "tool_calls")
    assert choice["message"]["content"] is None
    assert tool_parser("yell").plugin is tool_parser("shriek").plugin
    client = ToolClient("weather!{}")
    post(client, PATH, ask(tools=TOOLS), config=tools)
    assert client.requests[0]["params"].skip_special_tokens is False


def test_a_tool_parser_for_vllm_after_reasoning_of_octavo(tools: ServerConfig) -> None:
    config = msgspec.structs.replace(tools, reasoning_parser="qwen3")
    choice = both_ways('<think>hm!</think>weather!{"city": "Ulm"}', ask(tools=TOOLS), config)
    assert choice["message"]["reasoning"] == "hm!"
    assert choice["message"]["tool_calls"] == [weather("Ulm")]
    forced = both_ways('[{"name": "weather", "parameters": {}}]', ask(tools=TOOLS, tool_choice="required"), tools)
    assert len(forced["message"]["tool_calls"]) == 1


@pytest.mark.parametrize("text", [NEW_REASONING, OLD_REASONING], ids=["new", "old"])
def test_a_reasoning_parser_for_vllm(text: str, plugin: Any) -> None:
    config = msgspec.structs.replace(QWEN, reasoning_parser="hash", reasoning_parser_plugin=plugin(text, "hash.py"))
    choice = both_ways("hm#Hi.", ask(), config)
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("hm", "Hi.")
    reply = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
    choice = both_ways(f"hm#{reply}", ask(tools=TOOLS), config)
    assert (choice["message"]["reasoning"], choice["message"]["tool_calls"]) == ("hm", [weather("Ulm")])
    usage = post(ToolClient("hm#Hi."), PATH, ask(), config=config).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2}
    client = ToolClient("hm#{}")
    post(client, PATH, ask(response_format={"type": "json_object"}), config=config)
    assert client.requests[0]["params"].structured_outputs.start_after == "#"
    ended = ask(messages=[{"role": "user", "content": "hi #"}])
    assert both_ways("Hi.", ended, config)["message"]["content"] == "Hi."


def test_a_reasoning_parser_that_looks_at_the_text_only(plugin: Any) -> None:
    text = NEW_REASONING.replace("def is_reasoning_end(", "def not_used(").replace(
        "def extract_content_ids", "def other"
    )
    config = ServerConfig(reasoning_parser="hash", reasoning_parser_plugin=plugin(text))
    choice = both_ways("hm#", ask(), config)
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("hm", None)


def test_arguments_that_a_parser_has_not_streamed_follow_at_the_end(tools: ServerConfig, plugin: Any) -> None:
    text = OLD_TOOLS.replace(
        "        function = DeltaFunctionCall(arguments=delta_text)",
        "        self.prev_tool_call_arr = [{'arguments': arguments}]\n"
        "        self.streamed_args_for_tool = [arguments[:4]]\n"
        "        delta_text = delta_text if len(arguments) <= 4 else ''\n"
        "        function = DeltaFunctionCall(arguments=delta_text)",
    )
    config = msgspec.structs.replace(tools, tool_parser_plugin=plugin(text, "shriek.py"))
    choice = both_ways('weather!{"city": "Ulm"}', ask(tools=TOOLS), config)
    assert choice["message"]["tool_calls"] == [weather("Ulm")]


def test_a_reasoning_parser_without_marks_allows_no_constraint(plugin: Any) -> None:
    text = NEW_REASONING.replace('return "#"', "return None")
    config = ServerConfig(reasoning_parser="hash", reasoning_parser_plugin=plugin(text))
    for fields in ({"response_format": {"type": "json_object"}}, {"thinking_token_budget": 5}):
        response = post(ToolClient(), PATH, ask(**fields), config=config)
        assert response.status_code == 400 and "names no mark" in response.json()["error"]["message"]


def test_an_error_of_a_plugin_ends_its_request(tools: ServerConfig, plugin: Any) -> None:
    client = ToolClient("weather!{boom")
    config = msgspec.structs.replace(
        tools, tool_parser_plugin=plugin(OLD_TOOLS.replace('"boom" in delta_text', '"b" in delta_text'), "shriek.py")
    )
    response = post(client, PATH, ask(tools=TOOLS, stream=True), config=config)
    *_, last = events(response)
    assert "'shriek' of a plugin failed in extract_tool_calls_streaming: KeyError: 'boom'" in str(last["error"])
    broken = OLD_TOOLS.replace('before, mark, arguments = model_output.partition("!")', "raise ValueError('no')", 1)
    config = msgspec.structs.replace(tools, tool_parser_plugin=plugin(broken, "shriek.py"))
    response = post(ToolClient("weather!{}"), PATH, ask(tools=TOOLS), config=config)
    assert response.status_code == 500
    assert "failed in extract_tool_calls: ValueError: no" in response.json()["error"]["message"]


def test_a_plugin_that_does_not_fit_the_tokenizer_is_reported(plugin: Any) -> None:
    config = ServerConfig(reasoning_parser="think", reasoning_parser_plugin=plugin(THINK))
    response = post(ToolClient(), PATH, ask(), config=config)
    assert response.status_code == 500
    assert "'think' of a plugin failed in __init__: RuntimeError" in response.json()["error"]["message"]


def test_the_stand_ins_exist_only_while_a_plugin_loads(plugin: Any) -> None:
    load_plugin(plugin(OLD_TOOLS), "--tool-parser-plugin")
    assert not [name for name in sys.modules if name.partition(".")[0] == "vllm"]
    with vllm_modules():
        for name in NAMES:
            __import__(name)
        assert re.fullmatch("[0-9a-f]{32}", sys.modules["vllm.utils"].random_uuid())
        assert callable(sys.modules["vllm.logger"].init_logger("x").warning_once)
    assert not [name for name in sys.modules if name.partition(".")[0] == "vllm"]


LACKING = """
from vllm.reasoning import ReasoningParser, ReasoningParserManager

@ReasoningParserManager.register_module("half")
class Half(ReasoningParser):
    def extract_reasoning(self, model_output, request):
        return None, model_output
"""


@pytest.mark.parametrize(
    ("value", "kinds", "expected"),
    [
        ("5", "integer", 5),
        ("null", ["string", "null"], None),
        ("5", ["string", "integer"], 5),
        ("TRUE", "boolean", True),
        ('{"a": 1}', "object", {"a": 1}),
        ("x", "integer", "x"),
        ('"x"', "string", '"x"'),
    ],
)
def test_vllm_s_functions_for_bare_values(value: str, kinds: str | list[str], expected: object) -> None:
    assert coerce_to_schema_type(value, kinds) == expected
    schema = {"anyOf": [{"type": kind} for kind in ([kinds] if isinstance(kinds, str) else kinds)]}
    assert extract_types_from_schema(schema) == sorted([kinds] if isinstance(kinds, str) else kinds)


def test_vllm_s_functions_that_find_tools() -> None:
    tools = ChatCompletionRequest(tools=TOOLS).tools
    assert find_tool_name(tools, "weather") and not find_tool_name(tools, "other") and not find_tool_name(None, "f")
    assert find_tool_properties(tools, "weather") == {"city": {"type": "string"}}
    assert find_tool_properties(tools, "other") == find_tool_properties(None, "weather") == {}
    assert extract_types_from_schema({}) == ["string"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("from vllm.worker import Worker", "octavo has no vllm.worker"),
        ("from vllm.reasoning import QwenParser", "cannot import name 'QwenParser'"),
        ("raise RuntimeError('no GPU')", "RuntimeError: no GPU"),
        ("def", "SyntaxError"),
        (LACKING, "the reasoning parser 'half' has no method extract_reasoning_streaming"),
    ],
)
def test_a_plugin_that_does_not_load(text: str, message: str, plugin: Any) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_plugin(plugin(text), "--reasoning-parser-plugin")
    assert caught.value.message.startswith("--reasoning-parser-plugin ")
    assert ("docs/plugins.md" in caught.value.hint) == ("from vllm" in text and text is not LACKING)
    assert "vllm" not in sys.modules
    with pytest.raises(ConfigError, match="not a Python file"):
        load_plugin("missing.py", "--tool-parser-plugin")


def test_vllm_itself_is_used_if_it_is_installed(tmp_path: Path, plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, manager, lazy in (
        ("tool_parsers", "ToolParserManager", "tool_parsers"),
        ("reasoning", "ReasoningParserManager", "reasoning_parsers"),
    ):
        (tmp_path / "vllm").mkdir(exist_ok=True)
        (tmp_path / "vllm" / "__init__.py").touch()
        (tmp_path / "vllm" / f"{name}.py").write_text(
            f"class {manager}:\n    {lazy} = {{'builtin': int}}\n    lazy_parsers = {{}}\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "from vllm.tool_parsers import ToolParserManager\nclass Mine:\n"
    text += "    extract_tool_calls = extract_tool_calls_streaming = print\n"
    text += "ToolParserManager.lazy_parsers['mine'] = (__name__, 'Mine')\n"
    load_plugin(plugin(text), "--tool-parser-plugin")
    assert tool_parser("mine").plugin.__name__ == "Mine"
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def test_an_older_vllm_is_used_if_it_is_installed(tmp_path: Path, plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, text in (
        ("vllm/entrypoints/openai/tool_parsers", "class ToolParserManager:\n    tool_parsers = {}\n"),
        ("vllm/reasoning", "class ReasoningParserManager:\n    reasoning_parsers = {}\n"),
    ):
        for folder in (Path(module), *Path(module).parents):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / "__init__.py").touch()
        (tmp_path / module / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "from vllm.entrypoints.openai.tool_parsers import ToolParserManager\nclass Old:\n"
    text += "    extract_tool_calls = extract_tool_calls_streaming = print\n"
    load_plugin(plugin(text + "ToolParserManager.tool_parsers['old'] = Old\n"), "--tool-parser-plugin")
    assert tool_parser("old").plugin.__name__ == "Old"
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def test_a_folder_named_vllm_is_not_vllm(tmp_path: Path, plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "notes.txt").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("vllm")
    load_plugin(plugin(OLD_TOOLS), "--tool-parser-plugin")
    assert tool_parser("shriek").plugin.__name__ == "ShoutParser"
    assert list(sys.modules.pop("vllm").__path__) == [str(tmp_path / "vllm")]


def test_octavo_s_own_plugins(plugin: Any) -> None:
    text = (
        "from octavo.frontend.reasoning.parser import ReasoningParser\n"
        "from octavo.frontend.reasoning.registry import register_reasoning_parser\n"
        "register_reasoning_parser('mine', ReasoningParser(begins=('<r>',), ends=('</r>',), opening='<r>'))\n"
    )
    config = ServerConfig(reasoning_parser="mine", reasoning_parser_plugin=plugin(text))
    assert ChatSettings.of(config).reasoning is reasoning_parser("mine")
    message = both_ways("<r>hm</r>Hi.", ask(), config)["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "Hi.")
    assert add_up(post(ToolClient("Hi."), PATH, ask(stream=True), config=config))[0]["message"]["content"] == "Hi."
