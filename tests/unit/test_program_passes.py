"""Recording, fusing, narrowing and laying out programs, over operations that are never run."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from octavo.kernels.native.arguments import Arguments
from octavo.kernels.native.layout import ALIGNMENT, lay_out, row_bytes
from octavo.kernels.native.passes import fuse, narrow
from octavo.kernels.native.recorder import ProgramRecorder
from octavo.kernels.native.split import split, with_gathered_rows
from octavo.kernels.native.value import ROWS, Buffer, Form, Node, Value

MAX_ROWS = 32


@dataclass
class Model:
    """Writes programs by hand."""

    recorder: ProgramRecorder = field(default_factory=lambda: ProgramRecorder(torch.bfloat16))

    def source(self, width: int = 8) -> Value:
        return self._append(Node("source", [], [Buffer(width)], Arguments, is_row_wise=True))

    def rows(self, *inputs: Value, width: int = 0, in_place: int | None = None) -> Value:
        width = width or inputs[0].width
        return self._append(Node("rows", list(inputs), [Buffer(width)], Arguments, is_row_wise=True, in_place=in_place))

    def linear(self, x: Value, width: int = 8, form: Form | None = None) -> Value:
        return self._append(self._linear([x], width, form or Form(torch.bfloat16), "linear"))

    def _linear(self, inputs: list[Value], width: int, form: Form, name: str) -> Node:
        def absorb(reader: Node) -> Node | None:
            if reader.operation != "add":
                return None
            (residual,) = [value for value in reader.inputs if value.buffer is not node.outputs[0]]
            both = self._linear([inputs[0], residual], width, form, "linear+add")
            both.outputs, both.in_place = reader.outputs, 1
            return both

        node = Node(name, inputs, [Buffer(width)], Arguments, is_row_wise=False, input_form=form, absorb=absorb)
        return node

    def _append(self, node: Node) -> Value:
        return self.recorder.append(node, (node.outputs[0].width,))


def names(nodes: list[Node]) -> list[str]:
    return [node.operation for node in nodes]


def test_a_value_is_seen_as_a_tensor_would_be() -> None:
    value = Model().source(24)
    assert value.shape == (ROWS, 24) and value.dtype == torch.bfloat16
    first, second = value.split([8, 16], dim=1)
    assert (second.start, second.width) == (8, 16)
    heads = second.unflatten(1, (-1, 4))
    assert heads.shape == (ROWS, 4, 4) and heads.flatten(1).shape == (ROWS, 16)
    parts = value.unflatten(1, (3, 2, 4)).unbind(1)
    assert [(part.start, part.dims) for part in parts] == [(0, (2, 4)), (8, (2, 4)), (16, (2, 4))]
    assert first.float() is first


def test_values_cannot_be_taken_apart_in_other_ways() -> None:
    value = Model().source(24)
    for wrong in (
        lambda: value.split([8, 8], dim=1),
        lambda: value.unflatten(1, (5, 5)),
        lambda: value.flatten(0),
        lambda: value.unbind(1),
    ):
        with pytest.raises(AssertionError):
            wrong()


def test_a_residual_sum_goes_into_the_linear_layer_before_it() -> None:
    model = Model()
    hidden = model.source()
    result = hidden + model.linear(model.rows(hidden))
    nodes = fuse(model.recorder.nodes, [result])
    assert names(nodes) == ["source", "rows", "linear+add"]
    assert nodes[-1].outputs == [result.buffer]


def test_a_linear_layer_with_another_reader_keeps_its_output() -> None:
    model = Model()
    hidden = model.source()
    product = model.linear(hidden)
    total = hidden + product
    for results in ([total, product], [total, model.rows(product)]):
        assert "add" in names(fuse(model.recorder.nodes, results))


def test_values_that_only_linear_layers_read_are_stored_in_16_bits() -> None:
    model = Model()
    read_by_linear, read_by_both = model.rows(model.source()), model.rows(model.source())
    results = [model.linear(read_by_linear), model.linear(read_by_both), model.rows(read_by_both)]
    nodes = narrow(model.recorder.nodes, results)
    assert read_by_linear.buffer.type == torch.bfloat16
    assert read_by_both.buffer.type == torch.float32
    assert names(nodes).count("cast") == 1
    cast = nodes[names(nodes).index("cast")]
    assert nodes[names(nodes).index("cast") + 1].inputs[0].buffer is cast.outputs[0]


def test_layers_that_read_the_same_columns_share_one_conversion() -> None:
    model = Model()
    x = model.source(128)
    form = Form(torch.int8, group_size=32)
    results = [model.linear(x, form=form), model.linear(x, form=form), model.linear(x, form=Form(torch.int8, 64))]
    nodes = narrow(model.recorder.nodes, results)
    assert names(nodes) == ["source", "quantize", "linear", "linear", "quantize", "linear"]
    assert [len(node.inputs) for node in nodes if node.operation == "linear"] == [3, 3, 3]


def test_living_buffers_never_overlap() -> None:
    model = Model()
    hidden = model.source(24)
    for width in (8, 40, 16):
        inner = model.rows(model.linear(model.rows(hidden), width), model.linear(hidden, 24), width=24)
        hidden = hidden + model.rows(inner, in_place=0)
    nodes = model.recorder.nodes
    layout = lay_out(nodes, [hidden], MAX_ROWS)
    last_read = {value.buffer: index for index, node in enumerate(nodes) for value in node.inputs}
    last_read[hidden.buffer] = len(nodes)
    first = {buffer: index for index, node in enumerate(nodes) for buffer in node.outputs}
    for a, b in itertools.combinations(first, 2):
        lives_meet = first[a] < last_read[b] and first[b] < last_read[a]
        is_apart = (
            layout.offsets[a] + MAX_ROWS * row_bytes(a) <= layout.offsets[b]
            or layout.offsets[b] + MAX_ROWS * row_bytes(b) <= layout.offsets[a]
        )
        assert is_apart or not lives_meet
    assert layout.num_bytes < sum(MAX_ROWS * row_bytes(buffer) for buffer in first) / 2
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets.values())


def test_threads_wait_only_where_rows_meet() -> None:
    model = Model()
    x = model.rows(model.rows(model.source()))
    y = model.rows(model.linear(model.linear(x)))
    assert lay_out(model.recorder.nodes, [y], MAX_ROWS).waits == [False, False, True, True, True, True]


def test_an_early_operation_begins_beside_the_one_before_unless_it_reads_its_results() -> None:
    def waits(*, reads_product: bool = False, is_exchanged: bool = False) -> list[bool]:
        model = Model()
        x = model.rows(model.source())
        product = model.linear(x)
        model.recorder.nodes[-1].mixes_rows = is_exchanged
        sums = model.linear(product if reads_product else x)
        model.recorder.nodes[-1].is_early = True
        y = model.rows(product, sums)
        layout = lay_out(model.recorder.nodes, [y], MAX_ROWS)
        assert reads_product or len({layout.offsets[value.buffer] for value in (x, product, sums)}) == 3
        return layout.waits

    assert waits() == [False, True, False, True, True]
    assert waits(reads_product=True) == waits(is_exchanged=True) == [False, True, True, True, True]


def test_a_row_ahead_of_the_others_finds_no_memory_that_they_still_read() -> None:
    """Between two row-wise operations nobody waits: what the first reads must outlive the second."""
    model = Model()
    x = model.linear(model.source())
    a = model.rows(x, width=24)
    b = model.rows(a, width=40)
    offsets = lay_out(model.recorder.nodes, [b], MAX_ROWS).offsets
    assert len({offsets[value.buffer] for value in (x, a, b)}) == 3


def test_a_sum_in_place_of_a_value_that_is_read_later_gets_its_own_memory() -> None:
    def offsets_of(reads_later: bool) -> list[int]:
        model = Model()
        x = model.linear(model.source())
        y = model.rows(x, in_place=0)
        results: list[Any] = [model.rows(y, x) if reads_later else y]
        offsets = lay_out(model.recorder.nodes, results, MAX_ROWS).offsets
        return [offsets[x.buffer], offsets[y.buffer]]

    assert len(set(offsets_of(False))) == 1
    assert len(set(offsets_of(True))) == 2


def test_operations_after_the_last_attention_run_for_chosen_rows_only() -> None:
    model = Model()
    hidden = model.source()
    for _ in range(2):
        mixed = model.rows(model.linear(hidden), width=8)
        model.recorder.nodes[-1].mixes_rows = True
        hidden = hidden + model.linear(mixed)
    result = model.linear(model.rows(hidden))
    halves = split(fuse(model.recorder.nodes, [result]))
    assert halves.all_rows[-1].mixes_rows
    assert names(halves.chosen_rows) == ["linear+add", "rows", "linear"]
    assert [value.width for value in halves.passed] == [8, 8]  # of the mixing, and the residual stream
    tables = [torch.zeros(MAX_ROWS, 16)[:, :8] for _ in halves.passed]
    chosen = with_gathered_rows(halves, tables, model.recorder)
    assert names(chosen) == ["embedding", "embedding", "linear+add", "rows", "linear"]
    written = {buffer for node in chosen for buffer in node.outputs}
    assert all(value.buffer in written for node in chosen for value in node.inputs)


def test_tables_that_are_read_by_position_stay_with_all_rows() -> None:
    model = Model()
    mixed = model.rows(model.source())
    model.recorder.nodes[-1].mixes_rows = True
    late = model.source()
    halves = split(model.recorder.nodes)
    assert names(halves.all_rows) == ["source", "rows", "source"]
    model.rows(mixed, late)
    halves = split(model.recorder.nodes)
    assert {value.buffer for value in halves.passed} == {mixed.buffer, late.buffer}


@pytest.mark.parametrize(("has_wide_reader", "type_"), [(False, torch.bfloat16), (True, torch.float32)])
def test_readers_that_take_both_types_get_what_the_others_want(has_wide_reader: bool, type_: torch.dtype) -> None:
    model = Model()
    source = model.source(24)
    q, k, v = source.split([8, 8, 8], dim=1)
    store = Node("store", [k, v], [], Arguments, is_row_wise=True, takes_bf16=True)
    model.recorder.append_effect(store)
    results = [model.linear(q)]
    if has_wide_reader:
        results.append(model.rows(k))
    narrowed = narrow(model.recorder.nodes, results)
    assert source.buffer.type == type_
    assert ("cast" in names(narrowed)) is has_wide_reader
    assert [value.buffer for value in store.inputs] == [source.buffer] * 2
