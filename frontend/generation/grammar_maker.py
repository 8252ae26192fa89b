"""Makes the grammars of one client's requests, and sees to it that the core knows the vocabulary before the first."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Protocol, TypeVar

import msgspec

from octavo.frontend.generation.grammar import grammar_spec, special_tokens, vocabulary_of
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.requests import Vocabulary
from octavo.protocol.structured import GrammarSpec, StructuredOutputsParams

T = TypeVar("T")


class RunInThread(Protocol):
    """Does text work off the event loop."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        """Return what `work` returns."""


class Teachable(Protocol):
    """A connection to a core."""

    def teach(self, vocabulary: Vocabulary) -> None:
        """Tell the core what tokens stand for."""


class GrammarMaker:
    """For one connection to a core.

    Args:
        link: the connection.
        tokenizer: of the model.
        config: of the engine.
        run_in_thread: does text work off the event loop.
    """

    def __init__(
        self, link: Teachable, tokenizer: Tokenizer, config: ResolvedConfig, run_in_thread: RunInThread
    ) -> None:
        self._link = link
        self._tokenizer = tokenizer
        self._config = config
        self._run_in_thread = run_in_thread
        self._teaching = asyncio.Lock()
        self._has_taught = False

    async def make(self, asked: StructuredOutputsParams) -> GrammarSpec:
        """Return what the core is told of a form, once the core can compile it.

        Raises:
            InvalidRequestError: the form cannot be read.
        """
        async with self._teaching:
            if not self._has_taught:
                self._link.teach(await self._run_in_thread(self._vocabulary))
                self._has_taught = True
        asked = self._with_defaults(asked)
        return await self._run_in_thread(lambda: self._spec(asked))

    def _spec(self, asked: StructuredOutputsParams) -> GrammarSpec:
        marker = (asked.start_after or "") if asked.max_free_tokens is not None else ""
        token_ids = self._tokenizer.encode(marker, add_special_tokens=False)
        return grammar_spec(asked, self._special_tokens, token_ids)

    def _vocabulary(self) -> Vocabulary:
        return vocabulary_of(self._tokenizer, self._config.model.vocab_size, self._config.model.eos_token_ids)

    def _with_defaults(self, asked: StructuredOutputsParams) -> StructuredOutputsParams:
        """Return a form with what the engine's flags say of all forms."""
        is_compact = self._config.disable_any_whitespace and asked.whitespace_pattern is None
        return msgspec.structs.replace(
            asked,
            disable_any_whitespace=asked.disable_any_whitespace or is_compact,
            disable_additional_properties=(
                asked.disable_additional_properties or self._config.disable_additional_properties
            ),
        )

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        return special_tokens(self._tokenizer)
