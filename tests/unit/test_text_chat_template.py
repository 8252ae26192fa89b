"""Chat templates: content formats, continuing a message, the sandbox, and errors that say what to do."""

from pathlib import Path

import pytest
import small_tokenizers

from octavo.frontend.text.chat_template import ChatTemplate
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.errors import InvalidRequestError

PLAIN = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PARTS = (
    "{% for message in messages %}[{{ message.role }}]"
    "{% for part in message.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
)
EITHER = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
)
TRIMMING = "{% for message in messages %}[{{ message.role }}]{{ message.content | trim }};{% endfor %}"
USER = {"role": "user", "content": "hi"}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_roles_contents_and_special_tokens() -> None:
    assert template(PLAIN).render([USER]) == "[user]hi</s>[assistant]"
    assert template(PLAIN).render([USER], add_generation_prompt=False) == "[user]hi</s>"


@pytest.mark.parametrize(
    ("source", "content_format"),
    [
        (PLAIN, "string"),
        (TRIMMING, "string"),
        (PARTS, "openai"),
        (EITHER, "openai"),
        (
            "{% set rest = messages[1:] %}{% for m in rest %}{% for p in m['content'] %}{% endfor %}{% endfor %}",
            "openai",
        ),
        ("{% for m in messages %}{% set c = m.content %}{% for p in c %}{% endfor %}{% endfor %}", "openai"),
        ("{% for p in messages[0].content %}{% endfor %}", "openai"),
        ("{% for p in messages[0].content or [] %}{% endfor %}", "openai"),
        ("{% for p in (messages | last).content | list %}{% endfor %}", "openai"),
        (
            "{% macro show(c) %}{% for p in c %}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
            "openai",
        ),
        (
            "{% macro show(c, deep) %}{% for p in c %}{% endfor %}{% endmacro %}"
            "{% for m in messages %}{{ show(deep=1, c=m.content) }}{% endfor %}",
            "openai",
        ),
        ("{% for m in messages %}{% for p in m.get('content', []) %}{% endfor %}{% endfor %}", "openai"),
        ("{% set s = messages[0] if messages else none %}{% for p in s.content %}{% endfor %}", "openai"),
        (
            "{% for i in range(messages | length) %}{% for p in messages[i]['content'] %}{% endfor %}{% endfor %}",
            "openai",
        ),
        ("{% for p in messages[0].content | selectattr('type', 'eq', 'text') %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% for call in m.tool_calls %}{% endfor %}{% endfor %}", "string"),
        ("{% for tool in tools %}{% for p in tool.content %}{% endfor %}{% endfor %}", "string"),
    ],
)
def test_content_format_is_read_off_the_template(source: str, content_format: str) -> None:
    assert template(source).content_format == content_format


def test_parts_are_joined_for_a_template_of_strings() -> None:
    message = {"role": "user", "content": parts("one", "two")}
    assert template(PLAIN).render([message], add_generation_prompt=False) == "[user]one\ntwo</s>"


def test_strings_become_parts_only_where_a_template_knows_nothing_else() -> None:
    assert template(PARTS).render([USER]) == "[user]<hi>"
    assert template(EITHER).render([USER]) == "hi"
    assert template(EITHER).render([{"role": "user", "content": parts("a", "b")}]) == "<a><b>"


@pytest.mark.parametrize("message", [{"role": "assistant"}, {"role": "assistant", "content": None}])
def test_missing_content_is_empty(message: dict[str, object]) -> None:
    assert template(PLAIN).render([message], add_generation_prompt=False) == "[assistant]</s>"
    assert template(PARTS).render([message]) == "[assistant]"


def test_further_kinds_of_text_parts() -> None:
    content = ["a", {"type": "input_text", "text": "b"}, {"type": "refusal", "refusal": "c"}]
    assert "a\nb\nc" in template(PLAIN).render([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    "messages",
    [
        ["hi"],
        [{"content": "hi"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": ["text"]}]}],
        [{"role": "user", "content": [7]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        [{"role": "assistant", "tool_calls": ["f"]}],
        [{"role": "assistant", "tool_calls": 3}],
    ],
)
def test_malformed_messages_are_rejected(messages: list[object]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        template(PLAIN).render(messages)  # type: ignore[arg-type]
    assert caught.value.param.startswith("messages")


def test_arguments_of_tool_calls_are_objects() -> None:
    source = "{% for call in messages[0].tool_calls %}{{ call.function.arguments.city }}{% endfor %}"
    call = {"id": "1", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    message = {"role": "assistant", "tool_calls": [call]}
    assert template(source).render([message]) == "Ulm"
    assert call["function"]["arguments"] == '{"city": "Ulm"}'


def test_messages_of_the_caller_are_left_alone() -> None:
    message = {"role": "assistant", "content": parts("a")}
    template(PARTS).render([message], add_generation_prompt=False, continue_final_message=True)
    assert message == {"role": "assistant", "content": parts("a")}


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (PLAIN, "Sure: ", "[assistant]Sure: "),
        (TRIMMING, "Sure: ", "[assistant]Sure:"),
        (TRIMMING, "Sure", "[assistant]Sure"),
        (PARTS, "Sure ", "[assistant]<Sure "),
        (PARTS, parts("one", "two"), "[assistant]<one><two"),
    ],
)
def test_continuing_ends_inside_the_last_message(source: str, content: object, expected: str) -> None:
    message = {"role": "assistant", "content": content}
    text = template(source).render([message], add_generation_prompt=False, continue_final_message=True)
    assert text == expected


def test_continuing_needs_a_text_and_excludes_the_generation_prompt() -> None:
    for messages, asks_for_answer in (([USER], True), ([], False), ([{"role": "assistant"}], False)):
        with pytest.raises(InvalidRequestError) as caught:
            template(PLAIN).render(messages, add_generation_prompt=asks_for_answer, continue_final_message=True)
        assert caught.value.param == "continue_final_message"


def test_continuing_is_rejected_when_the_template_drops_the_message() -> None:
    with pytest.raises(InvalidRequestError, match="cannot be continued"):
        template("nothing").render([USER], add_generation_prompt=False, continue_final_message=True)


def test_tools_documents_and_further_variables_arrive() -> None:
    source = "{{ tools | tojson }} {{ documents[0].title }} {{ enable_thinking }} {{ messages | length }}"
    text = template(source).render(
        [USER], tools=[{"name": "caf\u00e9 <b>"}], documents=[{"title": "T"}], enable_thinking=False
    )
    assert text == '[{"name": "caf\u00e9 <b>"}] T False 1'
    assert template("{{ tools is none }}").render([USER]) == "True"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for n in [1, 2, 3] %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}", "1"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("{% if true %}\n    a\n{% endif %}\n", "    a\n"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
        ("{{ {'b': 1, 'a': '\u00e9'} | tojson(indent=2) }}", '{\n  "b": 1,\n  "a": "\u00e9"\n}'),
        ("{{ strftime_now('%%') }}", "%"),
    ],
)
def test_dialect(source: str, expected: str) -> None:
    assert template(source).render([USER]) == expected


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[3].content }}", "no element 3"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for n in range(10**9) %}{% endfor %}", "too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_failures_of_a_template_are_the_requests_error(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        template(source).render([USER])
    assert caught.value.param.startswith("messages")


def test_a_template_that_does_not_parse() -> None:
    with pytest.raises(InvalidRequestError, match="does not parse"):
        template("{% for %}")


class TestForModel:
    def tokenizer(self, own: str | None) -> Tokenizer:
        fast = small_tokenizers.byte_level()._fast
        return Tokenizer(fast, {"eos_token": "</s>"}, {"default": own} if own else {})

    def test_the_models_own(self) -> None:
        assert ChatTemplate.for_model(None, self.tokenizer(PLAIN)).render([USER]) == "[user]hi</s>[assistant]"

    def test_a_text_or_a_file_wins(self, tmp_path: Path) -> None:
        file = tmp_path / "template.jinja"
        file.write_text("file", encoding="utf-8")
        assert ChatTemplate.for_model("{{ 'text' }}", self.tokenizer(PLAIN)).render([USER]) == "text"
        assert ChatTemplate.for_model(str(file), self.tokenizer(PLAIN)).render([USER]) == "file"

    def test_none_at_all_names_the_remedy(self) -> None:
        with pytest.raises(InvalidRequestError, match="--chat-template"):
            ChatTemplate.for_model(None, self.tokenizer(None))

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequestError, match=r"absent\.jinja"):
            ChatTemplate.for_model(str(tmp_path / "absent.jinja"), self.tokenizer(PLAIN))


def test_content_format_can_be_chosen() -> None:
    message = {"role": "user", "content": parts("a", "b")}
    shown = "{{ messages[0].content }}"
    assert ChatTemplate(shown, {}, content_format="openai").render([message]) == str(parts("a", "b"))
    assert ChatTemplate(shown, {}, content_format="openai").render([USER]) == str(parts("hi"))
    assert ChatTemplate(PARTS, {}, content_format="string").render([USER]) == "[user]<><>"
    assert ChatTemplate(EITHER, {}, content_format="string").render([message]) == "a\nb"


@pytest.mark.parametrize(
    ("source", "role"),
    [("{{ messages[0].role }}", "system"), ("{% if messages[0].role == 'developer' %}D{% endif %}", "D")],
)
def test_developer_messages_become_system_messages_if_the_template_lacks_the_role(source: str, role: str) -> None:
    assert template(source).render([{"role": "developer", "content": "x"}]) == role


def test_reasoning_has_both_of_its_names() -> None:
    source = "{{ messages[0].reasoning_content }}{{ messages[0].reasoning }}"
    for name in ("reasoning", "reasoning_content"):
        assert template(source).render([{"role": "assistant", "content": "", name: "hm"}]) == "hmhm"


def test_lists_without_calls_are_left_out() -> None:
    source = "{{ 'tool_calls' in messages[0] }}"
    for calls in ([], None):
        assert template(source).render([{"role": "assistant", "content": "x", "tool_calls": calls}]) == "False"


def test_a_template_for_tools_is_used_when_there_are_some() -> None:
    tokenizer = Tokenizer(small_tokenizers.byte_level()._fast, {}, {"default": "plain", "tool_use": "{{ tools }}"})
    chosen = ChatTemplate.for_model(None, tokenizer)
    assert chosen.render([USER]) == "plain"
    assert chosen.render([USER], tools=[]) == "plain"
    assert chosen.render([USER], tools=[{"a": 1}]) == "[{'a': 1}]"
    assert ChatTemplate.for_model("{{ messages[0].role }}", tokenizer).render([USER], tools=[{"a": 1}]) == "user"


def test_variables_of_a_template_are_known() -> None:
    assert template("{{ enable_thinking }}{% set x = 1 %}{{ x }}").has_variable("enable_thinking")
    assert not template("{% set x = 1 %}{{ x }}").has_variable("x")


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "content[0].type", "images are not supported"),
        ({"role": "user", "content": ["a", {"type": "input_audio"}]}, "content[1].type", "audio"),
        ({"role": "user", "content": [{"type": "thing"}]}, "content[0].type", "'thing'"),
        ({"role": "user", "content": [{"text": "x"}]}, "content[0].type", "None"),
        ({"role": "user", "content": [5]}, "content[0]", "object"),
        ({"role": "user", "content": 5}, "content", "string or a list"),
        ({"role": 5}, "role", "assistant"),
        ({"role": "assistant", "tool_calls": "f"}, "tool_calls", "list"),
        ({"role": "assistant", "tool_calls": [{"function": 1}]}, "tool_calls[0].function", "object"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "tool_calls[0].function.arguments",
            "not JSON",
        ),
    ],
    ids=str,
)
def test_errors_name_the_path_of_the_invalid_part(message: dict[str, object], param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        template(PLAIN).render([USER, message])
    assert caught.value.param == f"messages[1].{param}"
    assert words in caught.value.message and param in caught.value.message
