"""`HarmonyFormat`: how the answers to one request are read."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.frontend.harmony.header import MARKS
from octavo.frontend.harmony.reader import HarmonyReader
from octavo.frontend.reasoning.parser import TagTokenizer


@dataclass(frozen=True, slots=True)
class HarmonyFormat:
    """Answers in channels."""

    prompt: str
    """The answer continues its last message."""
    functions: frozenset[str] = frozenset()
    """Names of the functions that may be called."""
    max_calls: int | None = None
    """Calls beyond this many are dropped."""

    separates_reasoning = True

    def open(self) -> HarmonyReader:
        """Return a reader of one answer."""
        return HarmonyReader.after(self.prompt, self.functions, self.max_calls)

    def num_reasoning_tokens(self, token_ids: Sequence[int], tokenizer: TagTokenizer) -> int:
        """Return how many of the generated tokens are in messages that are reasoning, or end these."""
        mark_ids = {tokenizer.token_id(mark) for mark in MARKS}
        reader, count = self.open(), 0
        for chunk in _chunks(token_ids, mark_ids):
            if reader.is_reasoning:
                count += len(chunk)
            reader.push(tokenizer.decode(chunk, skip_special_tokens=False))
        return count


def _chunks(token_ids: Sequence[int], mark_ids: set[int | None]) -> list[list[int]]:
    """Return the tokens in pieces: each mark alone, and what is between marks; all alone if marks are no tokens."""
    if None in mark_ids:
        return [[token_id] for token_id in token_ids]
    chunks: list[list[int]] = []
    for token_id in token_ids:
        if token_id in mark_ids or not chunks or chunks[-1][-1] in mark_ids:
            chunks.append([token_id])
        else:
            chunks[-1].append(token_id)
    return chunks
