"""Tokenizers and chat templates against transformers on the same files: older formats, several template styles."""

import json
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers
from source_tree import ROOT

from octavo.frontend.text.chat_template import ChatTemplate
from octavo.frontend.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}\n{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'}}\n"
    "{% endfor %}\n{% if add_generation_prompt %}\n{{ '<|im_start|>assistant\n' }}\n{% endif %}"
)
ALTERNATING = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
TOOLS = """\
{%- if tools %}
    {{- '# Tools\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
    {%- if loop.index0 > 4 %}{% break %}{% endif %}
    {%- if message.content is string %}
        {{- message.role ~ ': ' ~ message.content }}
    {%- else %}
        {%- for part in message.content %}{{ '<' ~ part.text ~ '>' }}{% endfor %}
    {%- endif %}
    {%- if message.role == 'assistant' %}{% generation %}{{ '!' }}{% endgeneration %}{% endif %}
{%- endfor %}
{{- ns.last }}{% if enable_thinking is defined and not enable_thinking %}{{ ' <think></think>' }}{% endif %}
"""
CONVERSATION = [
    {"role": "user", "content": "<hi> \u00e9 & \U0001f600"},
    {"role": "assistant", "content": " well  "},
    {"role": "user", "content": "more"},
]
TOOL = {"type": "function", "function": {"name": "caf\u00e9", "parameters": {"type": "object", "properties": {}}}}


def their_text(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_object=small_tokenizers.byte_level()._fast, bos_token="<|start|>", eos_token="<|end|>"
    )
    text = theirs.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
    assert isinstance(text, str)
    return text


def our_text(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    special_tokens = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    return ChatTemplate(source, special_tokens).render(messages, **options)


@pytest.mark.parametrize("source", [CHATML, ALTERNATING, TOOLS], ids=["chatml", "alternating", "tools"])
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "tools": [TOOL]},
        {"add_generation_prompt": True, "enable_thinking": False},
    ],
)
def test_same_text(source: str, options: dict[str, Any]) -> None:
    assert our_text(source, CONVERSATION, **options) == their_text(source, CONVERSATION, **options)


@pytest.mark.parametrize("source", [CHATML, ALTERNATING, TOOLS], ids=["chatml", "alternating", "tools"])
@pytest.mark.parametrize("content", ["Sure", "Sure: ", "Sure\n\n"])
def test_same_text_when_a_message_is_continued(source: str, content: str) -> None:
    messages = [CONVERSATION[0], {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert our_text(source, messages, **options) == their_text(source, messages, **options)


def test_same_text_for_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": parts}]
    options = {"add_generation_prompt": False}
    assert our_text(TOOLS, messages, **options) == their_text(TOOLS, messages, **options)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_older_files_are_converted(tmp_path: Path, adds_bos: bool) -> None:
    """vocab.json and merges.txt, as OPT and GPT-2 have them, give what transformers gives."""
    model = json.loads(small_tokenizers.byte_level()._fast.to_str())["model"]
    vocab = model["vocab"] | {"<|start|>": len(model["vocab"]), "<|end|>": len(model["vocab"]) + 1}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(merge) for merge in model["merges"]))
    special = {"bos_token": "<|start|>", "eos_token": "<|end|>", "unk_token": "<|end|>"}
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": adds_bos, **special}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))

    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path)
    for text in ("the caf\u00e9", "", "x<|end|> the"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert (ours.encode("the")[0] == ours.bos_token_id) is adds_bos


@pytest.mark.parametrize("name", ["hermes", "llama3_json"])
def test_calls_and_results_are_rendered_as_transformers_does(name: str) -> None:
    source = (ROOT / "docs" / "templates" / f"{name}.jinja").read_text()
    arguments = {"city": "Köln", "days": [1, None]}

    def conversation(arguments: Any, content: str | None) -> list[dict[str, Any]]:
        call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        return [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": content, "tool_calls": [call, call]},
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        ]

    # The API has arguments as text and may leave the content out.
    ours = our_text(source, conversation(json.dumps(arguments), None), tools=[TOOL])
    theirs = their_text(source, conversation(arguments, ""), tools=[TOOL], add_generation_prompt=True)
    assert ours == theirs
