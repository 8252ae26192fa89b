"""`HarmonyFormat`: how to read the answers to one request."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.frontend.harmony.header import MARKS
from octavo.frontend.harmony.reader import HarmonyReader
from octavo.frontend.reasoning.parser import TagTokenizer


@dataclass(frozen=True, slots=True)
class HarmonyFormat:
    """Format of answers that consist of messages in channels."""

    prompt: str
    """The prompt, whose last message the answer continues."""
    functions: frozenset[str] = frozenset()
    """Names of the functions that may be called."""
    max_calls: int | None = None
    """Number of calls after which further calls are dropped; `None` if unlimited."""

    separates_reasoning = True

    def open(self) -> HarmonyReader:
        """Return a reader of one answer."""
        return HarmonyReader.continuing(self.prompt, self.functions, self.max_calls)

    def num_reasoning_tokens(self, token_ids: Sequence[int], tokenizer: TagTokenizer) -> int:
        """Return how many of the generated tokens belong to reasoning messages, including the marks that end them."""
        mark_ids = {tokenizer.token_id(mark) for mark in MARKS}
        reader, count = self.open(), 0
        for chunk in _chunks(token_ids, mark_ids):
            if reader.is_reasoning:
                count += len(chunk)
            reader.push(tokenizer.decode(chunk, skip_special_tokens=False))
        return count


def _chunks(token_ids: Sequence[int], mark_ids: set[int | None]) -> list[list[int]]:
    """Split tokens into chunks: each mark, and the tokens between marks; single tokens if marks are not tokens."""
    if None in mark_ids:
        return [[token_id] for token_id in token_ids]
    chunks: list[list[int]] = []
    for token_id in token_ids:
        if token_id in mark_ids or not chunks or chunks[-1][-1] in mark_ids:
            chunks.append([token_id])
        else:
            chunks[-1].append(token_id)
    return chunks
