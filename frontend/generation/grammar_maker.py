"""Makes the grammars for one client's requests. Sends the vocabulary to the core before the first grammar."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Protocol, TypeVar

import msgspec

from octavo.frontend.generation.grammar import grammar_spec, special_tokens, vocabulary_of
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.requests import ModelVocabulary
from octavo.protocol.structured import GrammarSpec, StructuredOutputsParams

T = TypeVar("T")


class RunInThread(Protocol):
    """Runs text processing off the event loop."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        """Return what `work` returns."""


class VocabularyReceiver(Protocol):
    """A connection to a core."""

    def send_vocabulary(self, vocabulary: ModelVocabulary) -> None:
        """Send the bytes of all tokens to the core."""


class GrammarMaker:
    """Makes the grammars for one connection to a core.

    Args:
        link: the connection.
        tokenizer: the tokenizer of the model.
        config: the configuration of the engine.
        run_in_thread: runs text processing off the event loop.
    """

    def __init__(
        self, link: VocabularyReceiver, tokenizer: Tokenizer, config: ResolvedConfig, run_in_thread: RunInThread
    ) -> None:
        self._link = link
        self._tokenizer = tokenizer
        self._config = config
        self._run_in_thread = run_in_thread
        self._vocabulary_lock = asyncio.Lock()
        self._has_sent_vocabulary = False

    async def make(self, params: StructuredOutputsParams) -> GrammarSpec:
        """Return the grammar of a constraint as soon as the core can compile it.

        Raises:
            InvalidRequestError: the constraint is invalid.
        """
        async with self._vocabulary_lock:
            if not self._has_sent_vocabulary:
                self._link.send_vocabulary(await self._run_in_thread(self._vocabulary))
                self._has_sent_vocabulary = True
        params = self._with_defaults(params)
        return await self._run_in_thread(lambda: self._spec(params))

    def _spec(self, params: StructuredOutputsParams) -> GrammarSpec:
        marker = params.markers[0] if params.max_free_tokens is not None else ""
        token_ids = self._tokenizer.encode(marker, add_special_tokens=False)
        return grammar_spec(params, self._special_tokens, token_ids)

    def _vocabulary(self) -> ModelVocabulary:
        return vocabulary_of(self._tokenizer, self._config.model.vocab_size, self._config.model.eos_token_ids)

    def _with_defaults(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """Return a constraint with the defaults from the engine's flags."""
        is_compact = self._config.structured_output.disable_any_whitespace and params.whitespace_pattern is None
        return msgspec.structs.replace(
            params,
            disable_any_whitespace=params.disable_any_whitespace or is_compact,
            disable_additional_properties=(
                params.disable_additional_properties or self._config.structured_output.disable_additional_properties
            ),
        )

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        return special_tokens(self._tokenizer)
