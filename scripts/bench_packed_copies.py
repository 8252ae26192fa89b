"""How much a throughput depends on where the packed weights lie in physical memory.

A worker maps its packed weights from a file in `OCTAVO_CACHE`, so every engine that maps one file reads the same
physical pages for as long as the page cache holds them. This script runs the same commit with two copies of that file,
in turns, like the rows of `scripts/bench_cpu`: 64 requests at once, SmolLM2 in bfloat16. Then it starts both engines
again with the same files, to show that the difference belongs to the files and not to the processes. All of it is
repeated with new copies.

    PYTHONPATH=scripts .venv/bin/python -P scripts/bench_packed_copies.py --placements 3 --rounds 4
"""

import argparse
import random
import statistics
import tempfile
from pathlib import Path

from bench_cpu_parts.engines import Command, Octavo
from bench_cpu_parts.session import Session, close_all, free_port
from bench_cpu_parts.workloads import mixed_batch

from octavo.protocol.env import Env

START_LIMIT_S, RUN_LIMIT_S = 300.0, 120.0


def main() -> None:
    """Print one line for each pair of copies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--placements", type=int, default=3, metavar="N", help="pairs of copies")
    parser.add_argument(
        "--rounds", type=int, default=4, metavar="N", help="rounds of each engine, for each pair of processes"
    )
    args = parser.parse_args()
    for number in range(1, args.placements + 1):
        with tempfile.TemporaryDirectory(prefix="octavo-copies-") as directory:
            caches = [_cache(Path(directory) / name) for name in ("first", "second")]
            ratios = [_ratio(caches, args.rounds, f"{number} {start}") for start in (1, 2)]
        print(f"copies {number}: first / second {ratios[0]:.3f}, with new processes {ratios[1]:.3f}", flush=True)


def _cache(path: Path) -> Path:
    """Make a cache that shares everything with this user's, except packed weights."""
    path.mkdir()
    for entry in Env.read().cache_dir.iterdir():
        if entry.name != "packed":
            (path / entry.name).symlink_to(entry)
    return path


def _ratio(caches: list[Path], num_rounds: int, seed: str) -> float:
    """Return the median ratio of tokens per second with the first cache to those with the second."""
    sessions: list[Session] = []
    try:
        for cache in caches:
            command = Octavo().session("smollm2", "many", free_port())
            command = Command(command.words, (*command.environment, ("OCTAVO_CACHE", str(cache))))
            sessions.append(Session(command, cache / "session.log", START_LIMIT_S))
            _elapsed_s(sessions[-1], f"{seed} warm-up")
        ratios = []
        for number in range(num_rounds):
            ordered = sessions if number % 2 == 0 else sessions[::-1]
            elapsed_s = {session: _elapsed_s(session, f"{seed} {number}") for session in ordered}
            ratios.append(elapsed_s[sessions[1]] / elapsed_s[sessions[0]])
    finally:
        close_all(sessions)
    return statistics.median(ratios)


def _elapsed_s(session: Session, seed: str) -> float:
    session.wake()
    (workload,) = mixed_batch(random.Random(seed))
    elapsed_s = session.generate(workload, RUN_LIMIT_S)
    session.rest()
    return elapsed_s


if __name__ == "__main__":
    main()
