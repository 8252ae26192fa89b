"""How octavo's decode scales: with the number of requests at a short context, and with the context of one request.

Each point is run once for one token and once for all tokens: the difference is decode, without the prompts.
"""

import random
from pathlib import Path
from typing import Any

from bench_cpu_parts.engines import Octavo
from bench_cpu_parts.offline import Limits
from bench_cpu_parts.session import Session, free_port
from bench_cpu_parts.workloads import batch_of

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8000)
SHORT_CONTEXT = 128
NUM_DECODES = 64


def run(engine: Octavo, limits: Limits, logs: Path) -> list[dict[str, Any]]:
    """Return a row for each point and print it.

    Raises:
        EngineFailure: octavo cannot be started, or does not generate the requested tokens within the limit.
    """
    points = [(batch, SHORT_CONTEXT) for batch in BATCHES] + [(1, context) for context in CONTEXTS]
    command = engine.session("smollm2", "many", free_port())
    rows = []
    print(f"{engine.title}\n{'batch':>6} {'context':>8} {'decode tok/s':>13} {'ms per step':>12} {'prefill tok/s':>14}")
    with Session(command, logs / f"{engine.key}-scaling.log", limits.start_s) as session:
        for batch, context in points:
            rng = random.Random(f"{batch} {context}")
            best_first_s = best_decode_s = float("inf")
            for _ in range(limits.rounds):
                one, all_of_them = batch_of(batch, context, NUM_DECODES + 1)(rng)
                first_s = session.generate(one, limits.row_s)
                best_first_s = min(best_first_s, first_s)
                best_decode_s = min(best_decode_s, session.generate(all_of_them, limits.row_s) - first_s)
            row = {
                "batch": batch,
                "context": context,
                "decode_tokens_per_s": batch * NUM_DECODES / best_decode_s,
                "decode_step_ms": 1e3 * best_decode_s / NUM_DECODES,
                "prefill_tokens_per_s": batch * context / best_first_s,
            }
            rows.append(row)
            print("{:6d} {:8d} {:13.1f} {:12.2f} {:14.1f}".format(*row.values()), flush=True)
    return rows
