"""`embedding`: rows of the table, whatever the batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import random
from native_checks import NATIVE_DTYPES, native_rows

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.embedding import cases, embedding, embeddings, reference
from octavo.kernels.embedding.native import SOURCES, EmbeddingArguments
from octavo.kernels.native.arguments import Matrix
from octavo.kernels.native.library import NativeLibrary


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(("num_entries", "width"), cases.TABLES)
def test_embedding(num_entries: int, width: int, dtype: torch.dtype) -> None:
    table = random(num_entries, width, dtype=dtype)
    for rows in cases.ROWS:
        ids = torch.randint(0, num_entries, (rows,), generator=torch.Generator().manual_seed(rows))
        assert torch.equal(embedding(ids, table), reference.embedding(ids, table))


def native_embedding(
    library: NativeLibrary, ids: torch.Tensor, table: torch.Tensor, out_dtype: torch.dtype, source: str, offset: int = 0
) -> torch.Tensor:
    def arguments(_, out):
        return EmbeddingArguments(Matrix.of(table), out, offset, len(table), SOURCES[source], 0)

    return native_rows(library, "embedding", arguments, [], table.shape[1], out_dtype, **{source: ids})


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("source", SOURCES)
def test_native_embedding(native_library: NativeLibrary, source: str, dtype: torch.dtype) -> None:
    for num_entries, width in cases.TABLES:
        table = random(num_entries, width, dtype=dtype)
        for rows in cases.ROWS:
            ids = torch.randint(0, num_entries - 2, (rows,), generator=torch.Generator().manual_seed(rows))
            for out_dtype in NATIVE_DTYPES:
                actual = native_embedding(native_library, ids, table, out_dtype, source, offset=2)
                assert torch.equal(actual, reference.embedding(ids + 2, table).to(out_dtype))


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 40), width=st.integers(1, 70), out_dtype=st.sampled_from(NATIVE_DTYPES), data=st.data())
def test_native_embedding_of_any_shape(native_library: NativeLibrary, rows, width, out_dtype, data) -> None:
    ids = torch.tensor(data.draw(st.lists(st.integers(0, 29), min_size=rows, max_size=rows)))
    table = random(30, width, dtype=data.draw(st.sampled_from(cases.DTYPES)), seed=width)
    actual = native_embedding(native_library, ids, table, out_dtype, "token_ids")
    assert torch.equal(actual, reference.embedding(ids, table).to(out_dtype))


def test_embedding_rejects_indices_of_another_shape() -> None:
    with pytest.raises(ShapeError):
        embedding(torch.zeros(2, 2, dtype=torch.int64), random(4, 4))
    ids, table = torch.zeros(2, dtype=torch.int64), random(4, 4)
    with pytest.raises(ShapeError, match=r"\(1,\) and \(2,\) indices"):
        embeddings((ids, table), (ids[:1], table))


def test_rows_of_several_tables_are_those_of_each() -> None:
    ids, tables = torch.tensor([2, 0]), [random(4, 4), random(3, 7, dtype=torch.bfloat16)]
    found = embeddings(*((ids, table) for table in tables))
    assert all(torch.equal(rows, embedding(ids, table)) for rows, table in zip(found, tables, strict=True))
