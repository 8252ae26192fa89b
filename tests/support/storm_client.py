"""One application of a storm: `python -P -m storm_client ADDRESS SEED ROUNDS`, results as JSON on standard output."""

import asyncio
import hashlib
import json
import random
import sys
from typing import Any

from workloads import Ask, ask, random_requests

from octavo.frontend.client import AsyncClient

VOCAB_SIZE = 320
NUM_REQUESTS = 60
PER_ROUND = 40


def storm_requests() -> list[Ask]:
    """Return the requests that all applications draw from."""
    return random_requests(seed=99, count=NUM_REQUESTS, vocab_size=VOCAB_SIZE)


def digest(fingerprint: list[Any]) -> str:
    """Return a short form of everything that must be equal."""
    return hashlib.sha256(repr(fingerprint).encode()).hexdigest()


async def storm(address: str, seed: int, num_rounds: int) -> list[tuple[int, str]]:
    """Send rounds of random requests, abandoning nearly a third of them; return the results of the others."""
    rng = random.Random(seed)
    requests = storm_requests()
    results: list[tuple[int, str]] = []
    async with AsyncClient.connect(address) as client:

        async def one(number: int, delay_s: float, leaves_after: int | None) -> None:
            request = requests[number]
            await asyncio.sleep(delay_s)
            if leaves_after is None:
                results.append((number, digest(await ask(client, Ask(request.prompt, request.params)))))
                return
            outputs = client.generate(list(request.prompt), request.params)
            async for _ in outputs:
                leaves_after -= 1
                if leaves_after == 0:
                    break
            await outputs.aclose()

        for _ in range(num_rounds):
            async with asyncio.TaskGroup() as group:
                for _ in range(PER_ROUND):
                    leaves_after = rng.randrange(1, 6) if rng.random() < 0.3 else None
                    group.create_task(one(rng.randrange(NUM_REQUESTS), rng.random(), leaves_after))
    return results


if __name__ == "__main__":
    print(json.dumps(asyncio.run(storm(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))
