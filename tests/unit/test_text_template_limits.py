"""Templates that run forever or use all memory fail their own request, soon."""

import asyncio
import time

import pytest

from octavo.frontend.text import template_process, template_sandbox
from octavo.frontend.text.chat_template import ChatTemplate
from octavo.frontend.text.template_process import TemplateProcesses
from octavo.protocol.errors import InvalidRequestError

USER = {"role": "user", "content": "hi"}
ENDLESS = [
    "{% for a in r %}{% for b in r %}{% for c in r %}{% for d in r %}{% endfor %}{% endfor %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for m in messages recursive %}{% for n in r %}{{ loop(messages) if false }}{% for o in r %}{% for p in r %}"
    "{% endfor %}{% endfor %}{% endfor %}{% endfor %}",
]
GREEDY = [
    "{{ 'x' * 10 ** 12 }}",
    "{% set ns = namespace(s='x' * 1000) %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{{ 'x' | center(10 ** 12) }}",
    "{{ '%999999999999d' % 1 }}",
    "{{ 'x' * 10 ** 8 }}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_the_models_own_template_has_a_time_limit(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "TIME_LIMIT_S", 0.2)
    template = ChatTemplate(source, {})
    with pytest.raises(InvalidRequestError, match="takes more than") as caught:
        template.render([USER], r=list(range(2000)))
    assert caught.value.param == "messages"


def test_the_clock_starts_anew_for_every_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "TIME_LIMIT_S", 0.2)
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    for _ in range(3):
        assert template.render([USER]) == "hi"
        time.sleep(0.15)


def render_apart(*sources: str, **variables: object) -> list[object]:
    """Render templates in processes, at the same time; errors are returned."""

    async def render() -> list[object]:
        apart = TemplateProcesses()
        renderings = [apart.render(source, {"bos_token": "<s>"}, "auto", [USER], variables) for source in sources]
        return await asyncio.gather(*renderings, return_exceptions=True)

    return asyncio.run(render())


def test_a_requests_template_is_rendered_apart() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{ more }}{{ tools[0].name }}"
    good, unparsable, rejecting = render_apart(
        source, "{% if", "{{ raise_exception('no') }}", more="é", tools=[{"name": "f"}]
    )
    assert good == "<s>hiéf"
    assert isinstance(unparsable, InvalidRequestError) and unparsable.param == "chat_template"
    assert isinstance(rejecting, InvalidRequestError) and "no" in rejecting.message


def test_a_requests_template_cannot_take_the_memory() -> None:
    for error in render_apart(*GREEDY):
        assert isinstance(error, InvalidRequestError), error


def test_any_json_reaches_the_process() -> None:
    (text,) = render_apart("{{ big }} {{ text }} {{ deep[0].a }}", big=2**70, text="\x00é\u2028", deep=[{"a": None}])
    assert text == f"{2**70} \x00é\u2028 None"


def test_a_process_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "START_TIME_S", 1.0)
    monkeypatch.setattr(template_process, "TIME_LIMIT_S", 0.0)
    # Within a limit of its own that the child does not know of here, this one goes on for seconds.
    (error,) = render_apart(ENDLESS[0], r=list(range(2000)))
    assert isinstance(error, InvalidRequestError) and "time or memory limit" in error.message


def test_a_caller_that_leaves_leaves_no_process() -> None:
    async def leave() -> None:
        apart = TemplateProcesses()
        rendering = asyncio.create_task(apart.render(ENDLESS[0], {}, "auto", [USER], {"r": list(range(2000))}))
        await asyncio.sleep(0.3)
        rendering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(rendering, 10)

    asyncio.run(leave())
