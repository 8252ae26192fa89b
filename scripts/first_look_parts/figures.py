"""The result of a cell as plain values, which can be sent as JSON."""

from collections.abc import Sequence
from typing import Any

Bound = Sequence[tuple[float, float]]
"""Bytes and floating-point operations of consecutive parts; each part takes the longer of both times."""


def figure(
    key: str,
    title: str,
    unit: str,
    value: float,
    *,
    column: str = "octavo",
    seconds: float | None = None,
    bound: Bound = (),
    digits: int = 1,
    is_higher_better: bool = False,
) -> dict[str, Any]:
    """Return one number of the table.

    Args:
        key: key of its line; figures of several columns share it.
        title: title of its line.
        unit: unit of the value.
        value: the number.
        column: the measured engine or kernel.
        seconds: the measured time, which is compared with `bound`.
        bound: the minimum work; () if there is none to compare with.
        digits: digits after the decimal point.
        is_higher_better: whether a larger value is better, for comparisons with other runs.
    """
    return {
        "key": key,
        "title": title,
        "unit": unit,
        "value": value,
        "column": column,
        "seconds": seconds,
        "bound": [list(part) for part in bound],
        "digits": digits,
        "is_higher_better": is_higher_better,
    }


def cell_result(figures: Sequence[dict[str, Any]], detail: Any = None, lines: Sequence[str] = ()) -> dict[str, Any]:
    """Return the result of a cell.

    Args:
        figures: figures for the table.
        detail: further data for the report.
        lines: lines to print below the table.
    """
    return {"figures": list(figures), "detail": detail, "lines": list(lines)}
