"""The core gets the vocabulary once, before the first grammar; flags of the engine change the grammars."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from core_fakes import core_config
from small_tokenizers import byte_level

from octavo.frontend.generation.grammar_maker import GrammarMaker
from octavo.protocol.config import StructuredConfig
from octavo.protocol.config.structured_outputs import resolve_structured_output
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.requests import ModelVocabulary
from octavo.protocol.structured import StructuredOutputsParams

CHOICE = StructuredOutputsParams(choice=["a"])


class FakeLink:
    """Keeps what the core would be told."""

    def __init__(self) -> None:
        self.taught: list[ModelVocabulary] = []

    def send_vocabulary(self, vocabulary: ModelVocabulary) -> None:
        self.taught.append(vocabulary)


async def run_in_thread(work: Callable[[], Any]) -> Any:
    await asyncio.sleep(0.01)
    return work()


def maker(link: FakeLink, **changes: Any) -> GrammarMaker:
    return GrammarMaker(link, byte_level(), core_config(**changes), run_in_thread)


def test_the_vocabulary_goes_first_and_once() -> None:
    async def run() -> None:
        link = FakeLink()
        grammars = maker(link)
        specs = await asyncio.gather(*(grammars.make(CHOICE) for _ in range(3)))
        assert specs[0] == specs[1] == specs[2] == await grammars.make(CHOICE)
        (vocabulary,) = link.taught
        assert len(vocabulary.tokens) == core_config().model.vocab_size
        assert 0 in vocabulary.special_token_ids, "the model's end token is no text"

    asyncio.run(run())


def test_a_cancelled_request_does_not_cancel_the_vocabulary_for_others() -> None:
    async def run() -> None:
        link = FakeLink()
        grammars = maker(link)
        first = asyncio.create_task(grammars.make(CHOICE))
        second = asyncio.create_task(grammars.make(CHOICE))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).text == 'start: "a"'
        assert len(link.taught) == 1

    asyncio.run(run())


def test_a_form_that_cannot_be_read_is_rejected() -> None:
    with pytest.raises(InvalidRequestError):
        asyncio.run(maker(FakeLink()).make(StructuredOutputsParams(grammar="root ::= nothing")))


def test_flags_change_what_requests_get() -> None:
    schema = {"type": "object", "properties": {"a": {}}}
    settings = StructuredConfig(
        structured_outputs_config='{"disable_any_whitespace": true, "disable_additional_properties": true}'
    )
    changed = maker(FakeLink(), structured_output=resolve_structured_output(settings))
    text = asyncio.run(changed.make(StructuredOutputsParams(json=schema))).text
    assert '"whitespace_flexible":false' in text and '"additionalProperties":false' in text
    own = asyncio.run(changed.make(StructuredOutputsParams(json=schema, whitespace_pattern=" ?"))).text
    assert "whitespace_flexible" not in own and '"whitespace_pattern":" ?"' in own
    plain = asyncio.run(maker(FakeLink()).make(StructuredOutputsParams(json=schema))).text
    assert plain == '{"type":"object","properties":{"a":{}}}'
