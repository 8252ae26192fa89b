"""`TextThreads`: runs text processing in threads if it takes long."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from octavo.frontend.text.tokenizer import Tokenizer
from octavo.protocol.cores import num_usable_cores
from octavo.protocol.errors import PromptTooLongError

T = TypeVar("T")

SHORT_TEXT_CHARS = 2_000
"""Texts with fewer characters are tokenized in less time than a thread switch costs."""

LONG_TEXT_CHARS = 2**20
"""Texts with more characters are length-checked before tokenizing, which would take a considerable part of a second."""

MAX_TEXT_THREADS = 4
"""More than one thread, so that a long text does not block the others."""


class TextThreads:
    """The threads of one client. They start when they are needed."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(
            max_workers=min(MAX_TEXT_THREADS, num_usable_cores()), thread_name_prefix="octavo text"
        )

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def encode(
        self, tokenizer: Tokenizer, text: str, max_model_len: int, *, add_special_tokens: bool
    ) -> list[int]:
        """Tokenize a text, in a thread if it is long.

        Raises:
            PromptTooLongError: the text cannot fit even if all its tokens are the vocabulary's longest.
            InvalidRequestError: there is no tokenizer.
        """
        tokenizer.require("prompt")
        if len(text) <= SHORT_TEXT_CHARS:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if len(text) > LONG_TEXT_CHARS:
            limit = max(LONG_TEXT_CHARS, max_model_len * tokenizer.max_token_chars)
            if len(text) > limit:
                raise PromptTooLongError(
                    f"the text has {len(text)} characters: at most {limit} are tokenized by an engine that holds "
                    f"{max_model_len} tokens (max_model_len)",
                    "prompt",
                )
        return await self.run(lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def close(self) -> None:
        """Stop the threads; waiting work is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
