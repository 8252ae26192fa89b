"""Perplexity of a text, and how often two models think that the same token comes next."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.protocol.params import SamplingParams

if TYPE_CHECKING:
    from octavo.frontend.llm import LLM

PIECE_TOKENS = 512
"""The model reads so many tokens of the text together."""
_TEXT = Path(__file__).with_name("text.txt")


@dataclass(frozen=True, slots=True)
class Reading:
    """What a model thought of a text before it saw each token of it. The first token of a piece does not count."""

    logprobs: list[float]
    """Of the tokens of the text."""
    likeliest: list[int]
    """Token ids."""

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative logprob."""
        return math.exp(-sum(self.logprobs) / len(self.logprobs))

    def agreement(self, other: "Reading") -> float:
        """Return the share of tokens, 0 to 1, of which both models think that the same one comes next.

        Raises:
            ValueError: they read different tokens.
        """
        same = sum(mine == theirs for mine, theirs in zip(self.likeliest, other.likeliest, strict=True))
        return same / len(self.likeliest)


def fixed_text() -> str:
    """Return about a thousand words of prose, dialogue, code, numbers, tables and several languages."""
    return _TEXT.read_text(encoding="utf-8")


def read(llm: "LLM", text: str, piece_tokens: int = PIECE_TOKENS) -> Reading:
    """Let a model read a text in pieces.

    Args:
        llm: with a tokenizer.
        text: at least two tokens.
        piece_tokens: the length of all pieces but the last.

    Raises:
        InvalidRequestError: the pieces are longer than the model reads.
    """
    return read_tokens(llm, list(llm.get_tokenizer().encode(text)), piece_tokens)


def read_tokens(llm: "LLM", tokens: Sequence[int], piece_tokens: int = PIECE_TOKENS) -> Reading:
    """Let a model read tokens; see `read`."""
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
