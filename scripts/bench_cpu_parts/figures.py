"""Measurements by metric and engine: values over the rounds, shares of a ceiling, ratios between engines.

Rounds are kept in order, with a gap where one failed, so that two engines are compared within the same minute.
"""

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal

Against = Literal["llama", "vllm", "openvino", "best", "absolute", "ceiling"]


@dataclass(frozen=True)
class Target:
    """octavo's target: a factor of an engine's value, of the best engine's or of the ceilings' bound, or an
    absolute value."""

    against: Against
    must: float
    aim: float | None = None


@dataclass(frozen=True)
class Metric:
    """One line of the table."""

    key: str
    title: str
    unit: str
    is_higher_better: bool = True
    targets: tuple[Target, ...] = ()
    digits: int = 0


@dataclass(frozen=True)
class Figure:
    """One measurement."""

    value: float
    ceiling_share: float | None = None
    """Fraction of the bound given by the machine's ceilings, which are measured right before and after."""
    other_load: float | None = None
    """Cores used by other processes during the measurement."""


@dataclass
class Results:
    """All figures and failures."""

    figures: dict[str, dict[str, list[Figure | None]]] = field(default_factory=lambda: defaultdict(dict))
    """Figures by metric, engine and round; `None` for a failed round."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def add(self, metric: Metric, engine: str, figure: Figure | None) -> None:
        """Append a round's figure; `None` if the round failed."""
        self.metrics[metric.key] = metric
        self.figures[metric.key].setdefault(engine, []).append(figure)

    def fail(self, where: str, error: Exception) -> None:
        """Record a failure and print it immediately."""
        self.failures.append(f"{where}: {error}")
        print(f"  FAILED {where}: {error}", flush=True)

    def median(self, metric: Metric, engine: str) -> float | None:
        """Return the median over the rounds that did not fail."""
        values = [figure.value for figure in self.figures[metric.key].get(engine, []) if figure]
        return statistics.median(values) if values else None

    def ceiling_share(self, metric: Metric, engine: str) -> float | None:
        """Return the median fraction of the ceilings' bound; `None` if unknown."""
        figures = self.figures[metric.key].get(engine, [])
        shares = [figure.ceiling_share for figure in figures if figure and figure.ceiling_share]
        return statistics.median(shares) if shares else None

    def ratio(self, metric: Metric, engine: str, other: str) -> float | None:
        """Return the median over the rounds of one engine's value divided by the other's in the same round."""
        rounds = self.figures[metric.key]
        pairs = zip(rounds.get(engine, []), rounds.get(other, []), strict=False)
        ratios = [one.value / two.value for one, two in pairs if one and two and two.value]
        return statistics.median(ratios) if ratios else None

    def best_peer(self, metric: Metric) -> str | None:
        """Return the engine with the best median, except octavo's columns."""
        medians = {
            engine: value
            for engine in self.figures[metric.key]
            if not engine.startswith("octavo") and (value := self.median(metric, engine)) is not None
        }
        choose = max if metric.is_higher_better else min
        return choose(medians, key=lambda engine: medians[engine]) if medians else None

    def reached(self, metric: Metric, target: Target) -> tuple[float, bool] | None:
        """Return octavo's ratio (its value, for an absolute target) and whether it is met; None if unknown."""
        if target.against == "ceiling":
            share = self.ceiling_share(metric, "octavo")
            return None if share is None else (share, share >= target.must)
        other = self.best_peer(metric) if target.against == "best" else target.against
        if target.against == "absolute":
            got = self.median(metric, "octavo")
        else:
            got = self.ratio(metric, "octavo", other) if other else None
        if got is None:
            return None
        return got, got >= target.must if metric.is_higher_better else got <= target.must

    def as_json(self) -> dict[str, Any]:
        """Return everything, with medians and spreads, for the report."""
        rows = {}
        for key, metric in self.metrics.items():
            engines = {}
            for engine, figures in self.figures[key].items():
                values = [figure.value for figure in figures if figure]
                engines[engine] = {
                    "median": self.median(metric, engine),
                    "min": min(values, default=None),
                    "max": max(values, default=None),
                    "rounds": [figure and vars(figure) for figure in figures],
                }
            targets = [
                {"against": t.against, "must": t.must, "aim": t.aim, "reached": self.reached(metric, t)}
                for t in metric.targets
            ]
            rows[key] = {"title": metric.title, "unit": metric.unit, "engines": engines, "targets": targets}
        return {"rows": rows, "failures": self.failures}
