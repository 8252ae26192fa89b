"""Everything that handles sampling parameters agrees with their table."""

from pathlib import Path

import msgspec
import pytest

from octavo.frontend.cli.sampling_docs import render_sampling_docs
from octavo.frontend.http.schemas.sampling import SamplingFields
from octavo.kernels.sample.table import COLUMNS, RequestTable
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.params import SamplingParams, SamplingSpec
from octavo.protocol.sampling_parameter import Kind, Parameter, Stage
from octavo.protocol.sampling_table import PARAMETERS, ROWS


def missing_places(rows: tuple[Parameter, ...]) -> list[str]:
    """Return what does not yet know a parameter of these rows, or knows another one."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
    places = [f"SamplingParams.{row.name}" for row in rows if defaults.get(row.name, msgspec.NODEFAULT) != row.default]
    for row in rows:
        is_sent = row.is_copied or row.engine_range is not None or row.token_ids is not None
        if is_sent and row.name not in SamplingSpec.__struct_fields__:
            places.append(f"SamplingSpec.{row.name}")
        if row.is_request_field and row.name not in SamplingFields.__struct_fields__:
            places.append(f"SamplingFields.{row.name}")
        places += [f"RequestTable.{name}" for name in row.columns if name not in COLUMNS]
    names = {row.name for row in rows}
    columns = {name for row in rows for name in row.columns}
    places += [f"no row for SamplingParams.{name}" for name in defaults if name not in names]
    places += [f"no row for RequestTable.{name}" for name in COLUMNS if name not in columns]
    return places


def test_all_places_agree_with_the_table() -> None:
    assert missing_places(ROWS) == []
    assert len(PARAMETERS) == len(ROWS)
    assert (*COLUMNS, "lists_L2") == RequestTable.__slots__


def test_a_new_parameter_is_missed_where_it_belongs() -> None:
    new = Parameter(
        name="top_n_sigma",
        kind=Kind.NUMBER,
        stage=Stage.FILTER,
        default=0.0,
        minimum=0.0,
        engine_range=(0.0, 1e9),
        is_copied=True,
        is_request_field=True,
        columns=("top_n_sigma_S",),
    )
    assert missing_places((*ROWS, new)) == [
        "SamplingParams.top_n_sigma",
        "SamplingSpec.top_n_sigma",
        "SamplingFields.top_n_sigma",
        "RequestTable.top_n_sigma_S",
    ]


def test_a_parameter_without_a_row_is_found() -> None:
    rows = tuple(row for row in ROWS if row.name != "min_p")
    assert missing_places(rows) == ["no row for SamplingParams.min_p", "no row for RequestTable.log_min_p_S"]


@pytest.mark.parametrize("row", [row for row in ROWS if row.minimum is not None], ids=lambda row: row.name)
def test_bounds_are_those_of_every_place(row: Parameter) -> None:
    below = row.minimum if row.is_minimum_excluded else row.minimum - 1
    beyond = [below] if row.maximum is None else [below, row.maximum + 1]
    for value in beyond:
        with pytest.raises(InvalidRequestError, match=row.name):
            SamplingParams(**{row.name: value})
    schema = msgspec.json.schema(SamplingFields)["$defs"]["SamplingFields"]["properties"]
    if row.is_request_field and row.name != "seed":  # JSON integers of 64 bits are signed
        assert row.json_bounds.items() <= schema[row.name].items()


def test_defaults_change_nothing() -> None:
    spec = SamplingSpec(max_tokens=1, seed=0)
    for row in ROWS:
        if row.is_copied:
            assert getattr(spec, row.name) == row.default
            assert row.engine_fault(row.default, 100) is None


def test_the_page_is_made_from_the_table() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "sampling-parameters.md"
    assert page.read_text("utf-8") == render_sampling_docs(), "run scripts/docs"
