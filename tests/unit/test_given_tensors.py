"""Tensors of callers, in files or not, that are none, are damaged, or are larger than they look."""

import base64
import io
import zipfile
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.frontend.generation.tensors import RowsForm, decode_tensor
from octavo.frontend.media.precomputed import PrecomputedRows, precomputed_items, whole_numbers
from octavo.protocol.errors import InvalidRequestError

FORM = RowsForm("rows", 4, 8, "a limit")


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def nested() -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.zeros(2, 4)], layout=torch.strided)


NOT_DENSE = {
    "meta": lambda: torch.zeros(3, 4, device="meta"),
    "sparse": lambda: torch.eye(3, 4).to_sparse(),
    "nested": nested,
}


@pytest.mark.parametrize("name", NOT_DENSE)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_are_not_dense(name: str) -> None:
    tensor = NOT_DENSE[name]()
    with pytest.raises(InvalidRequestError, match="rows"):
        decode_tensor(text(saved(tensor)), "rows")
    with pytest.raises(InvalidRequestError, match="rows must be a dense tensor"):
        FORM.checked(tensor)
    with pytest.raises(InvalidRequestError, match="image_grid_thw must be a list or a dense tensor"):
        whole_numbers(tensor)
    with pytest.raises(InvalidRequestError, match="image: the rows do not divide among the 2 grids"):
        precomputed_items({"image_embeds": tensor, "image_grid_thw": [[1, 2, 2]] * 2}, "image", "image", is_one=True)


@pytest.mark.parametrize("shape", [(10**8,), (8, 4), (2**24, 2**24)])
def test_a_short_text_has_no_large_tensor(shape: tuple[int, ...]) -> None:
    small = torch.zeros(1, dtype=torch.int64)
    file = saved(small.as_strided(shape, [0] * len(shape)))
    assert len(file) < 4096
    with pytest.raises(InvalidRequestError, match="repeats numbers of a smaller tensor"):
        decode_tensor(text(file), "rows")
    view = torch.arange(64.0).view(8, 8)[:, 2:6]
    assert torch.equal(decode_tensor(text(saved(view)), "rows"), view)


@pytest.mark.parametrize("grid", [5, True, 1.5, "1", None, [], [1.5], [True], [[1, [2]]], [10**5000], {}, [None]])
def test_grids_that_are_none(grid: Any) -> None:
    with pytest.raises(InvalidRequestError, match="image_grid_thw must be a list or a dense tensor") as found:
        whole_numbers(grid)
    assert len(found.value.message) < 200


def test_a_grid_is_not_read_before_it_is_small() -> None:
    with pytest.raises(InvalidRequestError, match="image_grid_thw"):
        whole_numbers(torch.zeros(1, dtype=torch.int64).expand(10**12))


@pytest.mark.parametrize("rows", ["a text", [[0.0] * 4] * 5, torch.zeros(5), torch.zeros(2, 5, 4), None])
def test_rows_that_do_not_divide(rows: Any) -> None:
    grids = [[1, 2, 4], [1, 2, 6]]
    value = {"image_embeds": torch.zeros(5, 4), "image_grid_thw": grids}
    items = precomputed_items(value, "image", "image", is_one=True)
    assert [len(one.rows) for one in items if isinstance(one, PrecomputedRows)] == [2, 3]
    with pytest.raises(InvalidRequestError, match="image"):
        precomputed_items(
            value | {"image_embeds": rows, "image_grid_thw": [*grids, grids[0]]}, "image", "image", is_one=True
        )


CHANGES = st.lists(st.tuples(st.integers(0, 10**4), st.binary(max_size=3)), min_size=1, max_size=4)


@settings(max_examples=examples(200, 5000), deadline=None)
@given(changes=CHANGES, is_rows=st.booleans())
def test_a_damaged_file_is_read_or_refused(changes: list[tuple[int, bytes]], is_rows: bool) -> None:
    tensor = torch.zeros(2, 4) if is_rows else torch.tensor([[1, 2, 4]])
    with zipfile.ZipFile(io.BytesIO(saved(tensor))) as source:
        parts = {part.filename: source.read(part) for part in source.infolist()}
    (name,) = [one for one in parts if one.endswith("data.pkl")]
    pickled = bytearray(parts[name])
    for place, change in changes:
        start = place % len(pickled)
        pickled[start : start + max(1, len(change))] = change
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as target:
        for one, data in (parts | {name: bytes(pickled)}).items():
            target.writestr(one, data)
    try:
        found = decode_tensor(text(file.getvalue()), "rows")
        if is_rows:
            FORM.data(FORM.checked(found), "float32")
        else:
            whole_numbers(found)
    except InvalidRequestError as error:
        assert "rows" in error.message or "image_grid_thw" in error.message
