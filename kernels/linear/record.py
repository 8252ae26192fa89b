"""Records `linear` in a program: its inputs, and the operations after it that can be fused."""

from torch import Tensor

from octavo.kernels.linear.native import EPILOGUES, Epilogue, NativeLinear, NativeProduct, arguments, can_fuse
from octavo.kernels.native.arguments import Arguments, Matrix
from octavo.kernels.native.value import Buffer, Node, Value, as_tensor, value_of


def record(x_TI: Tensor, product: NativeProduct) -> Tensor:
    """Record the product of the rows with a packed weight."""
    value, packed = value_of(x_TI), product.packed
    node = _node(value, packed, Buffer(packed.num_outputs))
    return as_tensor(value.recorder.append(node, (packed.num_outputs,)))


def _node(
    x: Value, packed: NativeLinear, output: Buffer, epilogue: Epilogue = "none", residual: Value | None = None
) -> Node:
    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        if residual is None:
            return arguments(inputs, packed, outputs[0], epilogue=epilogue)
        return arguments(inputs[:-1], packed, outputs[0], epilogue=epilogue, residual=inputs[-1])

    def absorb(reader: Node) -> Node | None:
        if residual is not None:
            return None
        if reader.operation == "add":
            (other,) = [value for value in reader.inputs if value.buffer is not output]
            return _node(x, packed, reader.outputs[0], epilogue, other)
        following = next((name for name in EPILOGUES if name == reader.activation), None)
        if epilogue == "none" and following is not None and can_fuse(following, packed):
            return _node(x, packed, reader.outputs[0], following)
        return None

    return Node(
        "linear",
        [x] if residual is None else [x, residual],
        [output],
        bind,
        is_row_wise=False,
        in_place=None if residual is None else 1,
        keep_alive=[packed],
        input_form=packed.input_form,
        panels=packed.panels(epilogue),
        work=packed.num_inputs * packed.num_outputs,
        absorb=absorb,
    )
