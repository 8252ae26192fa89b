"""Makes the grammars of one client's requests, and sees to it that the core knows the vocabulary before the first."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from octavo.frontend.generation.grammar import grammar_spec, special_tokens, vocabulary_of
from octavo.frontend.link import CoreLink
from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.requests import Vocabulary
from octavo.protocol.structured import GrammarSpec, StructuredOutputsParams

RunInThread = Callable[[Callable[[], Vocabulary | GrammarSpec]], Awaitable[Vocabulary | GrammarSpec]]


class GrammarMaker:
    """For one connection to a core.

    Args:
        link: the connection.
        tokenizer: of the model.
        config: of the engine.
        run_in_thread: does text work off the event loop.
    """

    def __init__(
        self, link: CoreLink, tokenizer: Tokenizer, config: ResolvedConfig, run_in_thread: RunInThread
    ) -> None:
        self._link = link
        self._tokenizer = tokenizer
        self._config = config
        self._run_in_thread = run_in_thread
        self._teaching: asyncio.Task[None] | None = None

    async def make(self, asked: StructuredOutputsParams) -> GrammarSpec:
        """Return what the core is told of a form; it can compile it.

        Raises:
            InvalidRequestError: the form cannot be read.
        """
        if self._teaching is None or (self._teaching.done() and self._teaching.exception() is not None):
            self._teaching = asyncio.get_running_loop().create_task(self._teach())
        config = self._config
        asked = msgspec.structs.replace(
            asked,
            disable_any_whitespace=asked.disable_any_whitespace
            or (config.disable_any_whitespace and asked.whitespace_pattern is None),
            disable_additional_properties=asked.disable_additional_properties or config.disable_additional_properties,
        )
        # Shielded: a caller that leaves must not stop what the others wait for.
        await asyncio.shield(self._teaching)
        spec = await self._run_in_thread(lambda: grammar_spec(asked, special_tokens(self._tokenizer)))
        assert isinstance(spec, GrammarSpec)
        return spec

    async def _teach(self) -> None:
        model = self._config.model
        vocabulary = await self._run_in_thread(
            lambda: vocabulary_of(self._tokenizer, model.vocab_size, model.eos_token_ids)
        )
        assert isinstance(vocabulary, Vocabulary)
        self._link.teach(vocabulary)
