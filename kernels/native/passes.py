"""Optimizes a recorded program before its memory is planned: fuses operations, and chooses storage formats of inputs.

Results stay independent of the batch: where a number is rounded or stored changes in the same way for all rows.
"""

from collections import Counter
from collections.abc import Iterable

import torch

from octavo.kernels.cast.native import cast_node
from octavo.kernels.native.value import Buffer, Form, Node, Value
from octavo.kernels.quantize.native import quantize_node

_WIDE = Form(torch.float32)


def fuse(nodes: list[Node], results: Iterable[Value]) -> list[Node]:
    """Fuse linear layers with the only reader of their output: an activation or a residual sum."""
    num_readers = _count_readers(nodes, results)
    writer = {output: node for node in nodes for output in node.outputs}
    gone: set[int] = set()
    fused: list[Node] = []
    for node in nodes:
        for value in node.inputs:
            source = writer.get(value.buffer)
            if source is None or source.absorb is None or id(source) in gone:
                continue
            if num_readers[value.buffer] != 1 or value.width != value.buffer.width:
                continue
            if (both := source.absorb(node)) is not None:
                gone |= {id(source), id(node)}
                writer |= dict.fromkeys(both.outputs, both)
                fused.append(both)
                break
        else:
            fused.append(node)
    return [node for node in fused if id(node) not in gone]


def narrow(nodes: list[Node], results: Iterable[Value]) -> list[Node]:
    """Store the inputs of linear layers and attention in the format that they need: 16 bits, or levels with scales of
    groups.

    A buffer is written in 16 bits if one reader needs that and all other readers accept both types. Otherwise a
    conversion is inserted before the first reader, and later readers of the same columns use its result.
    """
    readers: dict[Buffer, set[Form]] = {}
    for node in nodes:
        for index, value in enumerate(() if node.takes_bf16 else node.inputs):
            readers.setdefault(value.buffer, set()).add((index == 0 and node.input_form) or _WIDE)
    for value in results:
        readers.setdefault(value.buffer, set()).add(_WIDE)
    for buffer, forms in readers.items():
        if forms == {Form(torch.bfloat16)}:
            buffer.type = torch.bfloat16
    converted: dict[tuple[Buffer, int, int, Form], list[Value]] = {}
    narrowed: list[Node] = []
    for node in nodes:
        form = node.input_form
        if form is not None and form.type != node.inputs[0].buffer.type:
            value = node.inputs[0]
            key = (value.buffer, value.start, value.width, form)
            if key not in converted:
                conversion = quantize_node(value, form) if form.has_levels else cast_node(value)
                narrowed.append(conversion)
                converted[key] = [Value(value.recorder, buffer, 0, (buffer.width,)) for buffer in conversion.outputs]
            node.inputs[:1] = converted[key]
            if node.in_place is not None:
                node.in_place += len(converted[key]) - 1
        narrowed.append(node)
    return narrowed


def _count_readers(nodes: list[Node], results: Iterable[Value]) -> Counter[Buffer]:
    counts = Counter(value.buffer for node in nodes for value in node.inputs)
    counts.update(value.buffer for value in results)
    return counts
