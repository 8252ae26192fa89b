"""Plots of benchmark reports, and those of the documentation."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from bench_cpu_parts.figures import Figure, Metric, Results
from bench_plot import NAMES, draw
from source_tree import ROOT

REPORTS = sorted((ROOT / "docs/plots").glob("*.json"))
PERFORMANCE = (ROOT / "docs/performance.md").read_text()


def report(results: Results) -> dict[str, Any]:
    machine = {"cores": 2, "cpu": "some <processor>"}
    return {
        "command": "scripts/bench_cpu --rounds 2 --json out.json", "commit": "abc", "date": "2026-11-27 21:00 UTC",
        "machine": machine, "settings": {"rounds": 2}, "results": results.as_json(),
    }  # fmt: skip


def test_a_panel_has_a_bar_for_each_engine_that_was_measured() -> None:
    results = Results()
    decode, batch = Metric("decode", "one & only", "tok/s"), Metric("batch", "octavo alone", "tok/s")
    for engine, values in {"octavo": (100.0, 80.0), "vllm": (50.0, 45.0), "llama": (None, None)}.items():
        for value in values:
            results.add(decode, engine, value and Figure(value))
    results.add(batch, "octavo", Figure(5.0))
    drawn = ElementTree.fromstring(draw(report(results)))
    texts = [text.text or "" for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text in NAMES.values()] == ["octavo", "vLLM"]
    assert "90.0" in "".join(texts) or "90" in texts, "the median of two rounds"
    assert "one & only, tok/s" in texts and not any("alone" in text for text in texts)
    assert "2 cores of some <processor>, 2026-11-27 21:00 UTC, commit abc" in texts
    assert "scripts/bench_cpu --rounds 2" in texts
    widths = [float(bar.get("width", "0")) for bar in drawn.iter("{http://www.w3.org/2000/svg}rect")][1:]
    assert widths[1] / widths[0] == pytest.approx(47.5 / 90, abs=0.01)


def test_a_report_without_a_peer_is_not_drawn() -> None:
    results = Results()
    results.add(Metric("batch", "octavo alone", "tok/s"), "octavo", Figure(5.0))
    with pytest.raises(ValueError, match="no row that compares octavo"):
        draw(report(results))


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_the_plots_of_the_documentation_are_those_of_their_reports(path: Path) -> None:
    recorded = json.loads(path.read_text())
    assert path.with_suffix(".svg").read_text() == draw(recorded, recorded["title"]), "run scripts/bench_plot.py"
    assert f"plots/{path.stem}.svg" in PERFORMANCE
    assert recorded["commit"] in PERFORMANCE and recorded["command"] in PERFORMANCE
    # Every number of the plot stands in one row of a table, engine beside engine.
    rows = [re.findall(r"([\d,]+) \(([\d,]+) to ([\d,]+)\)", line) for line in PERFORMANCE.splitlines()]
    numbers = [[tuple(int(part.replace(",", "")) for part in cell) for cell in row] for row in rows]
    for row in recorded["results"]["rows"].values():
        cells = [(engine["median"], engine["min"], engine["max"]) for engine in row["engines"].values()]
        assert cells in numbers, row["title"]


def test_there_are_plots() -> None:
    assert REPORTS
