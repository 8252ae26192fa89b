"""The results as a Markdown table: a line per metric, a column per engine, and octavo's targets."""

from collections.abc import Mapping, Sequence

from bench_cpu_parts.figures import Metric, Results, Target

_SIGNS = {True: "≥", False: "≤"}


def table(results: Results, titles: Mapping[str, str]) -> str:
    """Return the table; `titles` names the engines and gives their order.

    A cell is the median over the rounds, (smallest to largest), and the median fraction of the ceilings' bound.
    """
    measured = {engine for figures in results.figures.values() for engine in figures}
    engines = [engine for engine in titles if engine in measured]
    head = ["", "unit", *(titles[engine] for engine in engines), "octavo reached / must / aim", ""]
    lines = [head, ["---"] * len(head)]
    for metric in results.metrics.values():
        cells = [_cell(results, metric, engine) for engine in engines]
        lines.append([metric.title, metric.unit, *cells, *_reached(results, metric, titles)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def noise(results: Results) -> str:
    """Return a sentence about other load during the measurements."""
    loads = sorted(
        figure.other_load
        for engines in results.figures.values()
        for figures in engines.values()
        for figure in figures
        if figure and figure.other_load is not None
    )
    if not loads:
        return ""
    return f"Other programs took {loads[len(loads) // 2]:.2f} cores in the median measurement, {loads[-1]:.2f} at most."


def _cell(results: Results, metric: Metric, engine: str) -> str:
    figures = [figure for figure in results.figures[metric.key].get(engine, []) if figure]
    median = results.median(metric, engine)
    if median is None:
        return "failed" if engine in results.figures[metric.key] else ""
    text = _number(median, metric)
    if len(figures) > 1:
        values = [figure.value for figure in figures]
        text += f" ({_number(min(values), metric)}..{_number(max(values), metric)})"
    share = results.ceiling_share(metric, engine)
    return f"{text}, {share:.0%}" if share else text


def _reached(results: Results, metric: Metric, titles: Mapping[str, str]) -> Sequence[str]:
    """Return two cells: ratios, and targets with whether all are met."""
    texts, verdicts = [], []
    for target in metric.targets:
        found = results.reached(metric, target)
        if found is None:
            continue
        got, is_met = found
        texts.append(_target(got, metric, target, titles))
        verdicts.append(is_met)
    return ["; ".join(texts), "" if not verdicts else "yes" if all(verdicts) else "**no**"]


def _target(got: float, metric: Metric, target: Target, titles: Mapping[str, str]) -> str:
    sign = _SIGNS[metric.is_higher_better]
    if target.against == "absolute":
        aim = f", aim {target.aim:g}" if target.aim is not None else ""
        return f"{sign} {target.must:g}{aim}"
    if target.against == "ceiling":
        return f"{got:.0%} of the ceiling ≥ {target.must:.0%}"
    aim = f", aim {target.aim:g}x" if target.aim is not None else ""
    return f"{got:.2f}x {titles.get(target.against, 'the best')} {sign} {target.must:g}x{aim}"


def _number(value: float, metric: Metric) -> str:
    return f"{value:,.{metric.digits}f}"
