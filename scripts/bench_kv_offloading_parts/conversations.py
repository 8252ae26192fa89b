"""Conversations that go on at once. Another engine's Python runs this too: the standard library only."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

Generate = Callable[[list[int], int], AsyncIterator[tuple[Sequence[int], int]]]
"""(prompt, tokens to generate) -> new tokens, and how many tokens of the prompt were cached."""


@dataclass
class Run:
    """What one engine has done."""

    first_token_s: list[float] = field(default_factory=list)
    """Of all turns but the first of each conversation."""
    num_cached: int = 0
    num_prompt: int = 0
    elapsed_s: float = 0.0
    conversations: list[list[int]] = field(default_factory=list)


async def converse(generate: Generate, conversations: Sequence[Sequence[list[int]]], output_tokens: int) -> Run:
    """Have all conversations at once; each sends its next turn when it has its answer.

    Args:
        generate: of an engine.
        conversations: the user's tokens of each turn.
        output_tokens: of each answer.
    """
    run, started = Run(), time.perf_counter()
    running = [_have_conversation(generate, turns, output_tokens, run) for turns in conversations]
    run.conversations = list(await asyncio.gather(*running))
    run.elapsed_s = time.perf_counter() - started
    return run


async def _have_conversation(generate: Generate, turns: Sequence[list[int]], output_tokens: int, run: Run) -> list[int]:
    tokens: list[int] = []
    for number, turn in enumerate(turns):
        tokens += turn
        sent, is_first, answer = time.perf_counter(), True, list[int]()
        async for new_tokens, num_cached in generate(tokens[:], output_tokens):
            if is_first and number:
                run.first_token_s.append(time.perf_counter() - sent)
                run.num_cached += num_cached
                run.num_prompt += len(tokens)
            is_first = False
            answer += new_tokens
        tokens += answer
    return tokens
