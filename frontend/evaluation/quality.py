"""Perplexity of a model on a text, and the agreement of two models on the most likely next token."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.protocol.params import SamplingParams

if TYPE_CHECKING:
    from octavo.frontend.llm import LLM

PIECE_TOKENS = 512
"""Number of tokens that are evaluated with a common context."""
_TEXT = Path(__file__).with_name("text.txt")


@dataclass(frozen=True, slots=True)
class Reading:
    """A model's predictions for the tokens of a text. The first token of each piece is not predicted."""

    logprobs: list[float]
    """Logprob of each token of the text."""
    likeliest: list[int]
    """Id of the most likely token at each position."""

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative logprob."""
        return math.exp(-sum(self.logprobs) / len(self.logprobs))

    def agreement(self, other: "Reading") -> float:
        """Return the fraction of positions, from 0 to 1, at which both models predict the same most likely token.

        Raises:
            ValueError: the models read different tokens.
        """
        same = sum(mine == theirs for mine, theirs in zip(self.likeliest, other.likeliest, strict=True))
        return same / len(self.likeliest)


def fixed_text() -> str:
    """Return about a thousand words of prose, dialogue, code, numbers, tables and several languages."""
    return _TEXT.read_text(encoding="utf-8")


def read(llm: "LLM", text: str, piece_tokens: int = PIECE_TOKENS) -> Reading:
    """Evaluate a text with a model, in pieces.

    Args:
        llm: must have a tokenizer.
        text: at least two tokens.
        piece_tokens: number of tokens of each piece except the last.

    Raises:
        InvalidRequestError: a piece is longer than the model's context.
    """
    return read_tokens(llm, list(llm.get_tokenizer().encode(text)), piece_tokens)


def read_tokens(llm: "LLM", tokens: Sequence[int], piece_tokens: int = PIECE_TOKENS) -> Reading:
    """Evaluate token ids with a model; see `read`."""
    pieces = [tokens[begin : begin + piece_tokens] for begin in range(0, len(tokens), piece_tokens)]
    prompts: Sequence[Any] = [{"prompt_token_ids": piece} for piece in pieces if len(piece) > 1]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    reading = Reading([], [])
    for prompt, output in zip(prompts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None
        for token, candidates in zip(prompt["prompt_token_ids"][1:], output.prompt_logprobs[1:], strict=True):
            assert candidates is not None
            reading.logprobs.append(candidates[token].logprob)
            reading.likeliest.append(next(other for other, candidate in candidates.items() if candidate.rank == 1))
    return reading
