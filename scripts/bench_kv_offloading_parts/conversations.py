"""Concurrent conversations. Another engine's Python runs this file too, so it imports the standard library only."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

Generate = Callable[[list[int], int], AsyncIterator[tuple[Sequence[int], int]]]
"""(prompt, tokens to generate) -> new tokens, and the number of cached prompt tokens."""


@dataclass
class Run:
    """Results of one engine."""

    first_token_s: list[float] = field(default_factory=list)
    """Seconds to the first token of all turns but the first of each conversation."""
    num_cached: int = 0
    num_prompt: int = 0
    elapsed_s: float = 0.0
    conversations: list[list[int]] = field(default_factory=list)


async def converse(generate: Generate, conversations: Sequence[Sequence[list[int]]], output_tokens: int) -> Run:
    """Run all conversations concurrently; each sends its next turn when its last one is answered.

    Args:
        generate: runs a request on an engine.
        conversations: the user's tokens of each turn.
        output_tokens: number of tokens of each answer.
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
