"""Conversations that share system prompts, as requests in order of arrival."""

import heapq
import itertools
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.protocol.ids import ID_BYTES
from octavo.protocol.prefix_hash import ROOT_HASH, SHORT_HASH_BYTES, SPAN_TOKENS, hash_last_block

PREFILL_TOKENS_PER_S = 20_000.0
BLOCK_SIZE = 16
UTILIZATION = 0.7
"""Fraction of the time in which engines would compute prompts if nothing were cached."""
NUM_SYSTEM_PROMPTS = 40


@dataclass(slots=True)
class Turn:
    """One request of a conversation."""

    session: int
    token_ids: "array[int]"
    num_outputs: int
    arrival_s: float
    process: int = 0
    """Index of the HTTP process that routes the request."""
    engine: int = 0
    num_new_tokens: int = 0
    """Prompt tokens that the process expects the engine to compute; 0 once they are computed."""
    keys: list[int] = field(default_factory=list)
    """Short hashes of the prompt's complete spans."""


def turns(num_requests: int, num_engines: int, seed: int) -> Iterator[Turn]:
    """Yield the requests of conversations that share system prompts, in order of arrival."""
    rng = random.Random(seed)
    systems = [_tokens(rng, 1024) for _ in range(NUM_SYSTEM_PROMPTS)]
    mean_tokens = 2_300  # per prompt of this workload
    rate = UTILIZATION * num_engines * PREFILL_TOKENS_PER_S / mean_tokens
    sessions = itertools.count()
    heap: list[tuple[float, int, int, array[int]]] = []
    now = 0.0
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        if heap and heap[0][0] <= now:
            _, session, turn, history = heapq.heappop(heap)
        else:
            session, turn, history = next(sessions), 0, rng.choice(systems)
        prompt = history + _tokens(rng, rng.randrange(50, 400))
        num_outputs = rng.randrange(50, 300)
        yield Turn(session, prompt, num_outputs, now)
        if turn < 9 and rng.random() < 0.85:
            answer = _tokens(rng, num_outputs)
            heapq.heappush(heap, (now + rng.uniform(5, 40), session, turn + 1, prompt + answer))


def _tokens(rng: random.Random, count: int) -> "array[int]":
    """Return arbitrary tokens: they are only hashed, and drawing each of them would take most of a run."""
    return array("i", rng.randbytes(4 * count))


def span_keys(token_ids: "array[int]") -> list[int]:
    """Return the short hashes of the complete spans of a prompt."""
    data, size, block_hash, keys = token_ids.tobytes(), SPAN_TOKENS * ID_BYTES, ROOT_HASH, []
    for start in range(0, len(data) - size + 1, size):
        block_hash = hash_last_block(block_hash, data[start : start + size], 0, BLOCK_SIZE, ())
        keys.append(int.from_bytes(block_hash[:SHORT_HASH_BYTES], "little"))
    return keys
