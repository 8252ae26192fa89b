"""Routes a multi-turn workload to simulated engines, and compares policies by cache hits, queues and waiting.

An engine computes prompts one after another at a fixed rate and decodes all its requests concurrently. Its cache keeps
the latest blocks. Stored and evicted blocks are reported to every HTTP process a little later. Each HTTP process gets a
random part of the requests, and learns the load of the others from reports once a second. Engines may die: their
requests move, their caches are lost, and they return after a while.

The policy `prefix` is octavo's. `estimates` and `reports` use only a part of its knowledge: the prompts that a process
has sent to each engine, or the engines' reports. With --state-interval engines continue only from recurrent states, of
which their caches have fewer; `blocks` is a router that does not know this.

    scripts/simulate_routing --engines 8 --requests 20000 --processes 4
"""

import argparse
import statistics

from bench_report import report, write
from simulate_routing_parts.engine import Capacity, Engine
from simulate_routing_parts.simulation import Simulation
from simulate_routing_parts.workload import span_keys, turns

from octavo.protocol.prefix_hash import SPAN_TOKENS

CACHE_SPANS = 4_000
"""Spans in the cache of one engine: 256,000 tokens."""


def simulate(
    policy: str,
    num_engines: int,
    num_processes: int,
    num_requests: int,
    death_every_s: float,
    seed: int,
    capacity: Capacity = Capacity(CACHE_SPANS),
) -> dict[str, float]:
    """Return the results of one policy."""
    simulation = Simulation(num_engines, num_processes, capacity, policy, death_every_s, seed)
    simulation.run(turns(num_requests, num_engines, seed))
    waits = sorted(simulation.waits)
    return {
        "hit_rate": simulation.num_hit_tokens / simulation.num_prompt_tokens,
        "imbalance": statistics.fmean(simulation.imbalances) if simulation.imbalances else 1.0,
        "ttft_p50_s": waits[len(waits) // 2],
        "ttft_p99_s": waits[len(waits) * 99 // 100],
        "us_per_request": simulation.route_s / num_requests * 1e6,
        "us_of_reports": simulation.view_s / num_requests / num_processes * 1e6,
        "deaths": simulation.num_deaths,
        "moved": simulation.num_moved,
    }


def hit_rate_of_one_cache(num_engines: int, num_requests: int, seed: int, capacity: Capacity) -> float:
    """Return the hit rate of one engine that has the memory of all engines."""
    num_states = num_engines * capacity.num_states
    engine = Engine(Capacity(num_engines * capacity.num_spans, num_states, capacity.state_interval))
    num_tokens = num_hit = 0
    for turn in turns(num_requests, num_engines, seed):
        num_tokens += len(turn.token_ids)
        num_hit += engine.lookup(span_keys(turn.token_ids)) * SPAN_TOKENS
    return num_hit / num_tokens


def main() -> None:
    """Compare the policies and print a table."""
    parser = argparse.ArgumentParser(prog="scripts/simulate_routing", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--processes", type=int, default=1, help="number of HTTP processes, which route independently")
    parser.add_argument("--death-every", type=float, default=0.0, metavar="S", help="seconds between two deaths")
    parser.add_argument("--policies", default="prefix,estimates,reports,round_robin,least_loaded,hashing")
    parser.add_argument(
        "--state-interval",
        type=int,
        default=0,
        metavar="TOKENS",
        help="tokens between recurrent states, the only points from which engines continue; 0: no states",
    )
    parser.add_argument(
        "--states", type=int, default=500, help="with --state-interval: recurrent states in the cache of an engine"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the full report to this file")
    args = parser.parse_args()
    capacity = Capacity(CACHE_SPANS, args.states, args.state_interval)
    best = hit_rate_of_one_cache(args.engines, args.requests, args.seed, capacity)
    print(f"hit rate of one cache with the memory of all: {best:.1%}")
    print(
        f"{'policy':<14}{'hit rate':>9}{'of one':>8}{'imbalance':>11}"
        f"{'TTFT p50':>10}{'p99':>9}{'us each':>9}{'reports':>9}{'moved':>8}"
    )
    results = []
    for policy in args.policies.split(","):
        row = simulate(policy, args.engines, args.processes, args.requests, args.death_every, args.seed, capacity)
        results.append({"policy": policy, **row})
        print(
            f"{policy:<14}{row['hit_rate']:>9.1%}{row['hit_rate'] / best:>8.1%}{row['imbalance']:>11.2f}"
            f"{row['ttft_p50_s']:>9.3f}s{row['ttft_p99_s']:>8.3f}s{row['us_per_request']:>9.1f}"
            f"{row['us_of_reports']:>9.1f}{row['moved']:>8.0f}",
            flush=True,
        )
    write(report("simulate_routing", vars(args), results), args.json)


if __name__ == "__main__":
    main()
