"""Many runs with consecutive seeds, for `scripts/stress`. A failing run is shrunk and reported.

A run has at most `RUN_SIZE` requests, so that a failing one can be replayed in a second.
"""

import gc
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields, replace

from simulation.run import Report, run_scenario
from simulation.scenario import Scenario, draw_scenario
from simulation.variants import VARIANTS

RUN_SIZE = 500
OBSERVED_EVERY = 10
"""One in this many runs checks all invariants after each call of the scheduler, which takes most of its time."""


@dataclass(frozen=True)
class Order:
    """One run: a seed and its sizes."""

    seed: int
    num_requests: int
    num_kills: int
    asks: tuple[int, ...] | None = None
    """Keep only these requests, by their place in order of arrival; None: all."""
    faults: tuple[int, ...] | None = None
    """Keep only these faults."""
    is_observed: bool = True
    num_ranks: int = 1
    num_engines: int = 1
    variant: str = ""
    """Name of one of the `VARIANTS`."""

    @property
    def command(self) -> str:
        """The command that repeats it."""
        words = [f"scripts/stress --seed {self.seed} --requests {self.num_requests} --kills {self.num_kills}"]
        words += [f"--ranks {self.num_ranks}"] if self.num_ranks > 1 else []
        words += [f"--engines {self.num_engines}"] if self.num_engines > 1 else []
        words += [f"--variant {self.variant}"] if self.variant else []
        for name, kept in (("only-requests", self.asks), ("only-kills", self.faults)):
            if kept is not None:
                words.append(f"--{name} {','.join(map(str, kept)) or 'none'}")
        return " ".join(words)

    def scenario(self) -> Scenario:
        """Draw the scenario from the seed."""
        whole = draw_scenario(self.seed, self.num_requests, self.num_kills, self.num_ranks, self.num_engines)
        whole = VARIANTS[self.variant](whole) if self.variant else whole
        return replace(whole, asks=_kept(whole.asks, self.asks), faults=_kept(whole.faults, self.faults))


@dataclass(frozen=True)
class Failure:
    """A failed run."""

    order: Order
    kind: str
    """The error's type; a smaller run must fail with the same."""
    message: str
    details: str


@dataclass
class Totals:
    """The totals of many runs."""

    num_runs: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, outcome: Report | Failure) -> None:
        """Count a run."""
        self.num_runs += 1
        if isinstance(outcome, Failure):
            self.failures.append(outcome)
            return
        self.faults += outcome.faults
        for one in fields(outcome):
            if one.name != "faults":
                self.counts[one.name] += getattr(outcome, one.name)

    @property
    def lines(self) -> list[str]:
        """The totals as text."""
        counts = [f"{name.removeprefix('num_').replace('_', ' ')} {count}" for name, count in self.counts.items()]
        faults = [f"{kind} {count}" for kind, count in sorted(self.faults.items())]
        runs = f"runs {self.num_runs}, failed {len(self.failures)}"
        return [runs, ", ".join(counts), ", ".join(faults) or "no faults"]


def orders(
    seed: int,
    num_requests: int,
    num_kills: int,
    num_ranks: int = 1,
    num_engines: int = 1,
    variant: str = "",
) -> Iterator[Order]:
    """Divide a long run into short ones with consecutive seeds; a short run stays whole."""
    num_runs = max(1, -(-num_requests // RUN_SIZE))
    for index in range(num_runs):
        yield Order(
            seed + index,
            num_requests * (index + 1) // num_runs - num_requests * index // num_runs,
            num_kills * (index + 1) // num_runs - num_kills * index // num_runs,
            is_observed=num_runs == 1 or index % OBSERVED_EVERY == 0,
            num_ranks=num_ranks,
            num_engines=num_engines,
            variant=variant,
        )


def attempt(order: Order) -> Report | Failure:
    """Run a scenario; any exception is a failure of the run."""
    gc.disable()  # perf: nothing is garbage until the end, and then all of it is
    gc.freeze()  # perf: what was there before is not looked at, which takes longer than a run in a process with torch
    try:
        return run_scenario(order.scenario(), is_observed=order.is_observed)
    except Exception as error:
        return Failure(order, type(error).__name__, str(error) or "no message", traceback.format_exc())
    finally:
        gc.enable()
        gc.collect()


def attempt_all(wanted: Sequence[Order], num_processes: int) -> Iterator[Report | Failure]:
    """Run scenarios in order, optionally on several processes."""
    if num_processes == 1:
        yield from map(attempt, wanted)
        return
    with ProcessPoolExecutor(num_processes) as pool:
        yield from pool.map(attempt, wanted)


def shrink(failure: Failure, timeout_s: float) -> Failure:
    """Remove requests and faults as long as the same kind of error occurs, and return the smallest run found."""
    deadline = time.monotonic() + timeout_s
    whole = failure.order.scenario()
    best = failure
    kept: dict[str, tuple[int, ...]] = {
        "faults": _or_all(failure.order.faults, len(whole.faults)),
        "asks": _or_all(failure.order.asks, len(whole.asks)),
    }

    def still_fails(name: str, indices: tuple[int, ...]) -> bool:
        nonlocal best
        order = replace(failure.order, **{**kept, name: indices})
        outcome = attempt(order)
        if isinstance(outcome, Failure) and outcome.kind == failure.kind:
            best = outcome
            return True
        return False

    is_smaller = True
    while is_smaller and time.monotonic() < deadline:
        before = dict(kept)
        for name in kept:
            kept[name] = _minimal(kept[name], lambda indices, name=name: still_fails(name, indices), deadline)
        is_smaller = kept != before
    return best


def _minimal(
    indices: tuple[int, ...], still_fails: Callable[[tuple[int, ...]], bool], deadline: float
) -> tuple[int, ...]:
    """Remove parts of a list, large ones first, as long as the rest still fails."""
    size = len(indices)
    while size and time.monotonic() < deadline:
        start = 0
        while start < len(indices) and time.monotonic() < deadline:
            fewer = indices[:start] + indices[start + size :]
            if still_fails(fewer):
                indices = fewer
            else:
                start += size
        size //= 2
    return indices


def _or_all(indices: tuple[int, ...] | None, count: int) -> tuple[int, ...]:
    return tuple(range(count)) if indices is None else indices


def _kept(things: list, indices: tuple[int, ...] | None) -> list:
    return things if indices is None else [things[index] for index in indices]
