"""Which tokens of an output reach the parsers of plugins, and with which piece of the text."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_client import byte_tokenizer
from plugin_files import OLD_TOOLS

from octavo.frontend.plugins.loading import load_plugin
from octavo.frontend.plugins.reader import PluginReader
from octavo.frontend.plugins.tokenizer import plugin_tokenizer
from octavo.frontend.plugins.tool_reader import PluginToolReader
from octavo.frontend.plugins.vllm_types import ChatCompletionRequest
from octavo.frontend.reasoning.parser import ReasoningState
from octavo.frontend.reasoning.registry import reasoning_parser
from octavo.frontend.tools.answer import AnswerDelta, AnswerFormat
from octavo.frontend.tools.registry import tool_parser


class Recorder:
    """The next stage: keeps what it gets."""

    num_calls = 0

    def __init__(self) -> None:
        self.pushed: list[tuple[str, str]] = []

    def push(self, text: str, is_final: bool = False, token_ids: Sequence[int] = ()) -> AnswerDelta:
        self.pushed.append((text, bytes(token_ids).decode()))
        return AnswerDelta(content=text)


@pytest.mark.parametrize(
    ("reasoning", "pieces", "expected"),
    [
        # pieces of text and their tokens, whose text may come later
        (None, [("", "["), ("[f", "f"), ("", "!")], [("", "["), ("[f", "f"), ("", "!")]),
        ("qwen3", [("<think>h</think>", "<think>h</think>"), ("Hi", "Hi"), ("", "!")], [("Hi", "Hi"), ("", "!")]),
        ("qwen3", [("<think>h</think>", "<think>h</think>["), ("", "["), ("[[f", "f")], [("[[f", "[[f")]),
        ("qwen3", [("<think>h</think>Hi", "<think>h</think>Hi"), ("é", "é")], [("Hi", "Hi"), ("é", "é")]),
        (
            "qwen3",
            [("<think>h\n", "<think>h\n"), ("<tool_", "<tool_"), ("call>{", "call>{")],
            [("<tool_call>{", "\n<tool_call>{")],
        ),
        ("qwen3", [("<think>h</think>\n", "<think>h</think>\n"), ("Hi", "Hi")], [("Hi", "\nHi")]),
    ],
)
def test_every_token_of_the_answer_reaches_the_next_stage(
    reasoning: str | None, pieces: list[tuple[str, str]], expected: list[tuple[str, str]]
) -> None:
    stage, calls = reasoning and AnswerFormat(reasoning_parser(reasoning), ReasoningState.UNDECIDED).open(), Recorder()
    reader = PluginReader(stage or None, calls, plugin_tokenizer(byte_tokenizer()))
    for text, tokens in pieces:
        reader.push(text, False, list(tokens.encode()))
    assert [pushed for pushed in calls.pushed if any(pushed)] == expected


def test_content_that_the_model_did_not_write_has_the_tokens_of_its_piece() -> None:
    class Stage:
        def push(self, text: str, is_final: bool = False, token_ids: Sequence[int] = ()) -> AnswerDelta:
            return AnswerDelta(content="else" if text == "c" else "")

    reader = PluginReader(Stage(), calls := Recorder(), plugin_tokenizer(byte_tokenizer()))
    for text in "abcd":
        reader.push(text, False, list(text.encode()))
    assert calls.pushed[2] == ("else", "c")


def test_a_parser_may_end_its_call_with_a_token_that_has_no_text(tmp_path: Path) -> None:
    late = OLD_TOOLS.replace(
        "        function = DeltaFunctionCall(arguments=delta_text)",
        "        delta_text = '}' if not delta_text else delta_text.replace('}', '')\n"
        "        function = DeltaFunctionCall(arguments=delta_text)",
    )
    owed = OLD_TOOLS.replace(
        "        function = DeltaFunctionCall(arguments=delta_text)",
        "        if not delta_text:\n            return None\n"
        "        self.prev_tool_call_arr = [{'arguments': arguments}]\n"
        "        delta_text = delta_text.replace('}', '')\n"
        "        self.streamed_args_for_tool = [arguments.replace('}', '')]\n"
        "        function = DeltaFunctionCall(arguments=delta_text)",
    )
    unrecorded = owed.replace("delta_text.replace('}', '')", "delta_text").replace("arguments.replace('}', '')", "")
    for text in (late, owed, unrecorded):
        (tmp_path / "shriek.py").write_text(text)
        load_plugin(str(tmp_path / "shriek.py"), "--tool-parser-plugin")
        request = ChatCompletionRequest(tools=[])
        parser = tool_parser("shriek")([]).make(plugin_tokenizer(byte_tokenizer()), request)
        reader = PluginReader(None, PluginToolReader(parser, request, None), plugin_tokenizer(byte_tokenizer()))
        deltas = [reader.push(piece, False, list(piece.encode())) for piece in ("f", "!", '{"a": 1', "}")]
        deltas.append(reader.push("", True, [byte_tokenizer().token_id("<eos>")]))
        assert "".join(call.arguments for delta in deltas for call in delta.calls) == '{"a": 1}'
