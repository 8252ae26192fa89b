"""`render_sampling_docs`: the table of sampling parameters as the page `docs/sampling-parameters.md`."""

from octavo.protocol.sampling_table import ROWS, Parameter, Stage

_INTRODUCTION = """\
# Sampling parameters

Every field of `SamplingParams`, by the stage in which it acts. The same names are fields of the HTTP API, except those
marked *Python only*, which HTTP requests express in another way. [sampling.md](sampling.md) explains the stages.

This page is made by `scripts/docs` from `protocol/sampling_table.py`.
"""

_TITLES = {
    Stage.REQUEST: "Sequences and their text",
    Stage.LOGITS: "Logits",
    Stage.FILTER: "Filters",
    Stage.DRAW: "Draw",
    Stage.STOP: "End of a sequence",
    Stage.REPORT: "Logprobs",
}

_ONLY_IN_PYTHON = {"detokenize", "output_kind", "skip_reading_prefix_cache"}


def render_sampling_docs() -> str:
    """Return `docs/sampling-parameters.md`."""
    parts = [_INTRODUCTION]
    for stage, title in _TITLES.items():
        rows = [_row(row) for row in ROWS if row.stage is stage]
        parts += [f"## {title}", "", "| field | type | bounds | default | meaning |", "| --- | --- | --- | --- | --- |"]
        parts += [*rows, ""]
    return "\n".join(parts)


def _row(row: Parameter) -> str:
    meaning = f"{row.meaning} (*Python only*)" if row.name in _ONLY_IN_PYTHON else row.meaning
    return f"| `{row.name}` | {row.kind.value} | {_bounds(row)} | {_default(row)} | {meaning} |"


def _bounds(row: Parameter) -> str:
    parts = []
    if row.minimum is not None:
        parts.append(f"{'above' if row.is_minimum_excluded else 'from'} {_number(row.minimum)}")
    if row.maximum is not None:
        parts.append(f"to {_number(row.maximum)}")
    return " ".join(parts)


def _number(value: float) -> str:
    powers = {-(2**63): "-2^63", 2**31 - 1: "2^31 - 1", 2**64 - 1: "2^64 - 1"}
    return powers.get(int(value), f"{value:g}")


def _default(row: Parameter) -> str:
    if row.default is None:
        return ""
    if isinstance(row.default, bool):
        return "on" if row.default else "off"
    return f"`{row.default}`"
