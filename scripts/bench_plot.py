"""Draws reports of `scripts/bench_cpu` as SVG, readable on light and dark pages.

`.venv/bin/python scripts/bench_plot.py REPORT.json ...` writes each REPORT.svg next to its report.
"""

import argparse
import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

WIDTH = 820
MARGIN = 24
COLUMNS = 2
GAP = 36
BAR = 18
BAR_PITCH = 24
NAME_WIDTH = 78
VALUE_WIDTH = 62
HEAD = 58
PANEL_HEAD = 30
CAPTION_LINE = 18

NAMES = {"octavo": "octavo", "llama": "llama.cpp", "vllm": "vLLM", "openvino": "OpenVINO"}
"""Engines in the order in which they are drawn."""

STYLE = """
  .page { fill: #ffffff } .title, .panel, .name, .value { fill: #1b1f27 } .caption { fill: #5f6875 }
  .bar { fill: #a9b4c4 } .own { fill: #3457d5 } .spread { stroke: #1b1f27 }
  text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
  .title { font-size: 17px; font-weight: 600 } .panel { font-weight: 600 } .caption { font-size: 12px }
  .value { font-variant-numeric: tabular-nums }
  @media (prefers-color-scheme: dark) {
    .page { fill: #14161a } .title, .panel, .name, .value { fill: #e7eaf0 } .caption { fill: #9aa4b2 }
    .bar { fill: #4f5b6b } .own { fill: #8aa2ff } .spread { stroke: #e7eaf0 }
  }
"""

Json = Mapping[str, Any]


def draw(report: Json, title: str = "") -> str:
    """Return the SVG of a report: a panel per row with a bar per engine; the caption has machine, date and command.

    Rows without a peer are left out. A bar is the median over the rounds; the line on it reaches from the smallest to
    the largest round.

    Raises:
        ValueError: no row compares octavo with a peer.
    """
    rows = [row for row in report["results"]["rows"].values() if len(_measured(row)) > 1 and "octavo" in _measured(row)]
    if not rows:
        raise ValueError(f"{report['command']} has no row that compares octavo with another engine")
    heights = [PANEL_HEAD + BAR_PITCH * len(_measured(row)) for row in rows]
    lines = [max(heights[start : start + COLUMNS]) for start in range(0, len(rows), COLUMNS)]
    caption = _caption(report)
    height = HEAD + sum(lines) + GAP // 2 * (len(lines) - 1) + CAPTION_LINE * len(caption) + 2 * MARGIN
    title = title or "octavo beside other engines"
    name = escape(title)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="12"/>',
        _text(MARGIN, MARGIN + 14, "title", title),
    ]
    width, top = (WIDTH - 2 * MARGIN - GAP * (COLUMNS - 1)) // COLUMNS, HEAD
    for start, line_height in zip(range(0, len(rows), COLUMNS), lines, strict=True):
        for column, row in enumerate(rows[start : start + COLUMNS]):
            parts += _panel(row, MARGIN + column * (width + GAP), top, width)
        top += line_height + GAP // 2
    top += MARGIN
    parts += [_text(MARGIN, top + index * CAPTION_LINE, "caption", line) for index, line in enumerate(caption)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _measured(row: Json) -> dict[str, Json]:
    return {key: row["engines"][key] for key in NAMES if row["engines"].get(key, {}).get("median") is not None}


def _panel(row: Json, left: int, top: int, width: int) -> list[str]:
    engines = _measured(row)
    longest = max(engine["max"] for engine in engines.values())
    scale = (width - NAME_WIDTH - VALUE_WIDTH) / longest
    parts = [_text(left, top + 14, "panel", f"{row['title']}, {row['unit']}")]
    for index, (key, engine) in enumerate(engines.items()):
        y = top + PANEL_HEAD + index * BAR_PITCH
        start, end = (left + NAME_WIDTH + engine[side] * scale for side in ("min", "max"))
        parts += [
            _text(left, y + 13, "name", NAMES[key]),
            f'<rect class="{"own" if key == "octavo" else "bar"}" x="{left + NAME_WIDTH}" y="{y}" '
            f'width="{engine["median"] * scale:.1f}" height="{BAR}" rx="3"/>',
            f'<line class="spread" x1="{start:.1f}" x2="{end:.1f}" y1="{y + BAR / 2}" y2="{y + BAR / 2}"/>',
            _text(end + 8, y + 13, "value", f"{engine['median']:,.{0 if longest >= 100 else 1}f}"),
        ]
    return parts


def _caption(report: Json) -> list[str]:
    rounds = report["settings"]["rounds"]
    how = f"Medians of {rounds} rounds in which the engines took turns; lines reach from the slowest to the fastest."
    machine = report["machine"]
    where = f"{machine['cores']} cores of {machine['cpu']}, {report['date']}, commit {report['commit']}"
    # A long command has flags with paths, which tell the reader nothing.
    return [*([how] if rounds > 1 else []), where, report["command"].partition(" --json")[0]]


def _text(x: float, y: float, kind: str, text: str) -> str:
    return f'<text class="{kind}" x="{x:.0f}" y="{y:.0f}">{escape(text)}</text>'


def main() -> None:
    """Draw the reports named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.json", help="written by bench_cpu --json")
    parser.add_argument("--title", default="", help="heading of the plot; default: the report's own")
    args = parser.parse_args()
    for path in args.reports:
        report = json.loads(path.read_text("utf-8"))
        path.with_suffix(".svg").write_text(draw(report, args.title or report.get("title", "")), "utf-8")
        print(f"wrote {path.with_suffix('.svg')}")


if __name__ == "__main__":
    main()
