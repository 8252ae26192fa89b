"""Simulates expert parallelism: how evenly the tokens of a step are divided between ranks, by placement of experts.

Experts are drawn with a popularity that falls with their rank (Zipf) and drifts from step to step. Placements are made
from the counts of past steps and measured on later ones. The balance of a step is the mean number of (token, expert)
pairs of the ranks over the largest: 1 is perfect, and the time of a step is inversely proportional to it.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
"""Number of tokens of each expert."""


@dataclass(frozen=True)
class Placement:
    """The ranks that have each expert; tokens of an expert are divided evenly between its replicas."""

    ranks: tuple[tuple[int, ...], ...]
    num_ranks: int

    def loads(self, counts: Counts) -> npt.NDArray[np.float64]:
        """Return the number of pairs of each rank."""
        loads = np.zeros(self.num_ranks)
        for count, ranks in zip(counts, self.ranks, strict=True):
            for rank in ranks:
                loads[rank] += count / len(ranks)
        return loads

    def balance(self, counts: Counts) -> float:
        """Return the mean load divided by the largest."""
        loads = self.loads(counts)
        return float(loads.mean() / loads.max())

    @property
    def num_held(self) -> list[int]:
        """Number of experts on each rank."""
        held = [0] * self.num_ranks
        for rank in itertools.chain.from_iterable(self.ranks):
            held[rank] += 1
        return held


def in_order(counts: Counts, num_ranks: int, num_replicas: int) -> Placement:
    """Place experts in their order, equally many on each rank, like `--enable-expert-parallel`."""
    num_experts = len(counts)
    owners = [next(r for r in range(num_ranks) if e < num_experts * (r + 1) // num_ranks) for e in range(num_experts)]
    return Placement(tuple((owner,) for owner in owners), num_ranks)


def by_load(counts: Counts, num_ranks: int, num_replicas: int) -> Placement:
    """Replicate the experts with the most tokens per replica, then place replicas, the heaviest first.

    Each goes to the rank with the least load that has room for it and does not have the expert yet. Every rank holds
    the same number of experts, or one more: memory is the limit.

    Args:
        counts: tokens of each expert in past steps.
        num_ranks: number of ranks.
        num_replicas: number of additional copies, of all experts together.
    """
    copies = np.ones(len(counts), dtype=np.int64)
    for _ in range(num_replicas):
        shares = np.where(copies < num_ranks, counts / copies, -1.0)
        copies[int(shares.argmax())] += 1
    room = -(-int(copies.sum()) // num_ranks)
    loads, held = np.zeros(num_ranks), np.zeros(num_ranks, dtype=np.int64)
    ranks: list[list[int]] = [[] for _ in counts]
    shares = counts / copies
    for expert in sorted(range(len(counts)), key=lambda expert: (-shares[expert], expert)):
        for _ in range(copies[expert]):
            free = [rank for rank in range(num_ranks) if held[rank] < room and rank not in ranks[expert]]
            if not free:  # all ranks with room have it: another replica would not spread its load
                break
            rank = min(free, key=lambda rank: (loads[rank], rank))
            ranks[expert].append(rank)
            loads[rank] += shares[expert]
            held[rank] += 1
    if lost := [expert for expert, places in enumerate(ranks) if not places]:
        raise AssertionError(f"no room for experts {lost}")
    return Placement(tuple(map(tuple, ranks)), num_ranks)


def draw_steps(
    num_steps: int, tokens: int, num_experts: int, top_k: int, *, skew: float, drift: float, seed: int
) -> list[Counts]:
    """Return the tokens of each expert in some steps; a token has `top_k` different experts.

    Args:
        num_steps: number of steps.
        tokens: tokens of each step.
        num_experts: experts of the layer.
        top_k: experts of a token.
        skew: exponent of the popularity; 0: all experts are equally popular.
        drift: standard deviation by which the logarithm of a popularity changes from step to step.
        seed: seed of the draws.
    """
    noise = np.random.default_rng(seed)
    logits = -skew * np.log(noise.permutation(num_experts) + 1.0)
    steps = []
    for _ in range(num_steps):
        logits = logits + drift * noise.standard_normal(num_experts)
        # The largest of logits with Gumbel noise are a draw without replacement.
        scores = logits + noise.gumbel(size=(tokens, num_experts))
        chosen = np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]
        steps.append(np.bincount(chosen.ravel(), minlength=num_experts))
    return steps


PLACEMENTS: dict[str, Callable[[Counts, int, int], Placement]] = {"in order": in_order, "by load": by_load}


def measure(steps: Sequence[Counts], num_ranks: int, num_replicas: int, window: int, name: str) -> float:
    """Return the mean balance of the steps after the first `window`; experts are placed anew every `window` steps."""
    balances = []
    for start in range(window, len(steps), window):
        placement = PLACEMENTS[name](np.sum(steps[start - window : start], axis=0), num_ranks, num_replicas)
        balances += [placement.balance(counts) for counts in steps[start : start + window]]
    return float(np.mean(balances))


def main() -> None:
    """Print a table of balances."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--window", type=int, default=50, help="steps between two placements")
    parser.add_argument("--skew", type=float, default=0.8)
    parser.add_argument("--drift", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    steps = draw_steps(
        args.steps, args.tokens, args.experts, args.top_k, skew=args.skew, drift=args.drift, seed=args.seed
    )
    print("balance of steps: mean load of the ranks over the largest")
    print(f"{'ranks':>6} {'in order':>9} {'by load':>8} {'+ 1/8 replicas':>15} {'+ 1/4 replicas':>15}")
    for num_ranks in (2, 4, 8, 16):
        cells = [measure(steps, num_ranks, 0, args.window, name) for name in PLACEMENTS]
        cells += [measure(steps, num_ranks, args.experts // part, args.window, "by load") for part in (8, 4)]
        print(f"{num_ranks:>6} {cells[0]:>9.2f} {cells[1]:>8.2f} {cells[2]:>15.2f} {cells[3]:>15.2f}")


if __name__ == "__main__":
    main()
