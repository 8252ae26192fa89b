"""Records `experts` in a program: five operations, of which the last can add the residual stream.

There are seven if several engines divide the experts: the first publishes the engine's tokens, and the last but one
returns the outputs that belong to the tokens of each engine.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels.dispatch import require
from octavo.kernels.experts.adapters import Deltas, ExpertAdapters, RecordedAdapters
from octavo.kernels.experts.exchange import ExpertExchange, GiveRowsArguments, ReturnOutputsArguments
from octavo.kernels.experts.native import (
    CombineArguments,
    PlacedRows,
    QuantizePlacesArguments,
    TokenBlocksArguments,
    dispatch_arguments,
    native_weights,
    product_arguments,
    structures,
)
from octavo.kernels.experts.weights import PackedExperts
from octavo.kernels.linear.native import NativeLinear
from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Form, Node, Recorder, Value, as_tensor, value_of
from octavo.kernels.quantize.native import QuantizeArguments
from octavo.kernels.routing import Routing


def record(
    x_TD: Tensor,
    routing: Routing,
    packed: PackedExperts,
    exchange: Callable[[Tensor], Tensor] | None,
    engines: ExpertExchange | None = None,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """Record all operations; see `octavo.kernels.experts.experts`."""
    return _Recording(value_of(x_TD), routing, packed, engines).record(exchange, adapters)


class _Recording:
    """The operations of one layer, and the values that they share."""

    def __init__(self, x: Value, routing: Routing, packed: PackedExperts, engines: ExpertExchange | None) -> None:
        self._x = x
        self._packed = packed
        self._engines = engines
        self._experts, self._weights = value_of(routing.expert_TK), value_of(routing.weight_TK)
        self._top_k = self._experts.width
        self._num_places = self._top_k * (engines.num_engines if engines else 1)
        """Rows by place for which there is memory, per row of the step: all tokens may have their experts on this
        rank."""
        self._recorder: Recorder = x.recorder
        # Read as one array; one row of the step would hold enough.
        self._firsts = Value(self._recorder, Buffer(packed.num_experts + 2, torch.int32), 0, (packed.num_experts + 2,))
        self._places = Value(self._recorder, Buffer(self._top_k, torch.int32), 0, (self._top_k,))

    def record(self, exchange: Callable[[Tensor], Tensor] | None, adapters: ExpertAdapters | None) -> Tensor:
        gates, ups, downs = map(native_weights, (self._packed.gates, self._packed.ups, self._packed.downs))
        form = _common_form([*gates, *ups])
        if self._engines is None:
            places = self._places
            rows = self._dispatch(form)
        else:
            places, rows = self._dispatch_of_all(form, self._engines)
        down_form = _common_form(downs)
        is_16_bit = down_form.type == torch.bfloat16
        intermediate = PlacedRows(
            self._num_places, self._packed.intermediate, torch.bfloat16 if is_16_bit else torch.float32
        )
        first, second = (gates, ups) if gates else (ups, None)
        changes, of_ups, of_downs = None, None, None
        if adapters is not None:
            require(self._engines is None, "experts: adapters of tokens that several engines exchange")
            changes = RecordedAdapters(adapters, self._packed, self._experts, self._places, self._firsts)
            of_ups = changes.of_gates_and_ups(self._x)
        activated = self._product(rows, first, second, intermediate, of_ups, has_activation=True)
        if changes is not None:
            of_downs = changes.of_downs(activated[0][1], intermediate)
        if down_form.has_levels:
            activated = self._quantize(activated, down_form)
        outputs = PlacedRows(self._num_places, self._packed.width, torch.float32)
        output = self._product(activated, downs, None, outputs, of_downs, has_activation=False)[0][1]
        if self._engines is not None:
            self._return(output, outputs, places, self._engines)
            return self._combine(None, outputs)
        if exchange is not None:
            output = value_of(exchange(as_tensor(output)))
        return self._combine(output, outputs)

    def _append(self, node: Node) -> list[Value]:
        self._recorder.append_effect(node)
        return [Value(self._recorder, buffer, 0, (buffer.width,)) for buffer in node.outputs]

    def _parts(self, form: Form, num_places: int) -> list[PlacedRows]:
        """Return the parts of a token's row in the form that the products need."""
        width = self._packed.width
        if not form.has_levels:
            return [PlacedRows(num_places, width, form.type)]
        num_groups = -(-width // form.group_size)
        return [
            PlacedRows(num_places, num_groups * form.group_size, form.type),
            PlacedRows(num_places, num_groups, torch.float32),
            PlacedRows(num_places, num_groups, torch.int32),
        ]

    def _dispatch(self, form: Form) -> "_Rows":
        layouts = self._parts(form, self._num_places)

        def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
            *rows, experts = inputs
            places, firsts, *buffers = outputs
            placed = [layout.matrix(buffer) for layout, buffer in zip(layouts, buffers, strict=True)]
            return dispatch_arguments(self._packed, experts, rows, placed, places, firsts, TokenBlocksArguments())

        outputs = [Buffer(layout.buffer_width, layout.type) for layout in layouts]
        node = Node(
            "dispatch",
            [self._x, self._experts],
            [self._places.buffer, self._firsts.buffer, *outputs],
            bind,
            is_row_wise=False,
            input_form=form,
        )
        return list(zip(layouts, self._append(node)[2:], strict=True))

    def _dispatch_of_all(self, form: Form, engines: ExpertExchange) -> "tuple[Value, _Rows]":
        """Return the places and the rows of the tokens of all engines."""
        require(
            (engines.width, engines.top_k) == (self._packed.width, self._top_k),
            f"experts: {self._top_k} for each of {self._packed.width} numbers, and shared memory for {engines.top_k} "
            f"for each of {engines.width}",
        )
        layouts = self._parts(form, self._num_places)
        place_layout = PlacedRows(engines.num_engines, self._top_k, torch.int32)

        def bind_give(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
            *rows, experts = inputs
            missing = [Matrix()] * (3 - len(rows))
            return GiveRowsArguments(
                experts,
                (Matrix * 3)(*rows, *missing),
                engines.own(engines.experts),
                (Matrix * 3)(*map(engines.own, engines.rows(layouts)), *missing),
                engines.count_address,
                engines.is_publisher,
                engines.group.address,
            )

        def bind_dispatch(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
            places, firsts, *buffers = outputs
            placed = [layout.matrix(buffer) for layout, buffer in zip(layouts, buffers, strict=True)]
            rows, blocks = engines.rows(layouts), engines.blocks
            places = place_layout.matrix(places)
            return dispatch_arguments(self._packed, engines.experts, rows, placed, places, firsts, blocks)

        give = Node(
            "give_rows",
            [self._x, self._experts],
            [],
            bind_give,
            is_row_wise=False,
            mixes_rows=True,
            keep_alive=[engines],
            input_form=form,
            max_rows=engines.max_rows,
        )
        self._recorder.append_effect(give)
        outputs = [Buffer(layout.buffer_width, layout.type) for layout in layouts]
        places = Buffer(place_layout.buffer_width, torch.int32)
        node = Node("dispatch", [], [places, self._firsts.buffer, *outputs], bind_dispatch, is_row_wise=False)
        places_value, _, *rows = self._append(node)
        return places_value, list(zip(layouts, rows, strict=True))

    def _return(self, output: Value, layout: PlacedRows, places: Value, engines: ExpertExchange) -> None:
        place_layout = PlacedRows(engines.num_engines, self._top_k, torch.int32)

        def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
            own = self._packed.own
            return ReturnOutputsArguments(
                engines.experts,
                place_layout.matrix(inputs[1]),
                layout.matrix(inputs[0]),
                engines.outputs,
                outputs[0],
                engines.blocks,
                own.start,
                len(own),
                engines.group.address,
            )

        self._recorder.append_effect(
            Node(
                "return_outputs",
                [output, places],
                [self._places.buffer],
                bind,
                is_row_wise=False,
                mixes_rows=True,
                keep_alive=[engines],
            )
        )

    def _quantize(self, rows: "_Rows", form: Form) -> "_Rows":
        ((layout, value),) = rows
        group_size = form.group_size
        num_groups = -(-layout.width // group_size)
        layouts = [
            PlacedRows(self._num_places, num_groups * group_size, form.type),
            PlacedRows(self._num_places, num_groups, torch.float32),
            PlacedRows(self._num_places, num_groups, torch.int32),
        ]

        def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
            placed = [part.matrix(buffer) for part, buffer in zip(layouts, outputs, strict=True)]
            arguments = QuantizeArguments.of(layout.matrix(inputs[0]), placed, form)
            own = self._packed.own
            return QuantizePlacesArguments(arguments, inputs[1].data, own.start, len(own))

        outputs = [Buffer(part.buffer_width, part.type) for part in layouts]
        node = Node("quantize_places", [value, self._firsts], outputs, bind, is_row_wise=False)
        return list(zip(layouts, self._append(node), strict=True))

    def _product(
        self,
        rows: "_Rows",
        weights: list[NativeLinear],
        ups: list[NativeLinear] | None,
        out: PlacedRows,
        deltas: Deltas | None,
        *,
        has_activation: bool,
    ) -> "_Rows":
        structure = structures(weights)
        up_structure = None if ups is None else structures(ups)

        def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
            x = [layout.matrix(matrix) for (layout, _), matrix in zip(rows, inputs, strict=False)]
            # The sum over ranks with the same tokens has each row once.
            is_part = self._engines is None and len(self._packed.own) < self._packed.num_experts
            return product_arguments(
                self._packed,
                x,
                structure,
                up_structure,
                out.matrix(outputs[0]),
                inputs[len(rows)],
                None if deltas is None else (deltas.layout.matrix(inputs[-2]), inputs[-1]),
                has_activation=has_activation,
                clears_others=is_part and not has_activation,
            )

        node = Node(
            "expert_product",
            [*(value for _, value in rows), self._firsts, *([] if deltas is None else [deltas.values, deltas.changed])],
            [Buffer(out.buffer_width, out.type)],
            bind,
            is_row_wise=False,
            keep_alive=[structure, up_structure, weights, ups],
            work=self._top_k * weights[0].num_inputs * weights[0].num_outputs * (1 if ups is None else 2),
        )
        return [(out, self._append(node)[0])]

    def _combine(self, output: Value | None, layout: PlacedRows) -> Tensor:
        node = self._combine_node(output, layout, Buffer(self._packed.width))
        return as_tensor(self._recorder.append(node, (self._packed.width,)))

    def _combine_node(
        self, output: Value | None, layout: PlacedRows, out: Buffer, residual: Value | None = None
    ) -> Node:
        """Return the sum of the outputs by place, or (`None`) of the outputs that all ranks have returned to this
        engine."""
        bias_ED, engines = self._packed.down_bias_ED, self._engines
        inputs = [self._experts, self._weights, self._places]
        inputs += [value for value in (residual, output) if value is not None]

        def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
            bias = Matrix() if bias_ED is None else Matrix.of(bias_ED)
            placed = engines.own_outputs if engines else layout.matrix(inputs[-1])
            return CombineArguments(placed, *inputs[:3], bias, inputs[3] if residual else Matrix(), outputs[0])

        def absorb(reader: Node) -> Node | None:
            if residual is not None or reader.operation != "add":
                return None
            (other,) = [value for value in reader.inputs if value.buffer is not out]
            return self._combine_node(output, layout, reader.outputs[0], other)

        return Node(
            "combine",
            inputs,
            [out],
            bind,
            is_row_wise=False,
            mixes_rows=engines is not None,  # the returned outputs are valid until the next exchange
            in_place=None if residual is None else 3,
            keep_alive=[bias_ED, engines],
            absorb=absorb,
        )


_Rows = list[tuple[PlacedRows, Value]]
"""Rows by place: one value, or levels, scales and sums."""


def _common_form(weights: list[NativeLinear]) -> Form:
    forms = {weight.input_form for weight in weights}
    require(len(forms) == 1, f"experts: weights that need their rows in different forms: {forms}")
    return forms.pop()
