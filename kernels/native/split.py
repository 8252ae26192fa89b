"""Splits a recorded model after the last operation that mixes rows, or that involves ranks of other engines.

The first part is computed for all rows of a step. The second part is needed only for rows whose logits are used: one
row of a prompt's last chunk, none of earlier chunks. With 30 layers this saves most of one layer's work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from octavo.kernels.embedding.native import embedding_node
from octavo.kernels.native.recorder import ProgramRecorder
from octavo.kernels.native.value import Buffer, Node, Value


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """The nodes of one recording, split into two programs."""

    all_rows: list[Node]
    chosen_rows: list[Node]
    passed: list[Value]
    """Complete buffers that the first program writes and the second program reads."""


def split(nodes: list[Node], wanted: Sequence[Value] = ()) -> Halves:
    """Split after the last node that mixes rows; lookups by the step's own ids stay in the first part.

    `wanted`: additional results of the first part.
    """
    buffers = {value.buffer for value in wanted}
    last = max(index for index, node in enumerate(nodes) if node.mixes_rows or not buffers.isdisjoint(node.outputs))
    all_rows = [node for index, node in enumerate(nodes) if index <= last or not node.inputs]
    chosen_rows = [node for index, node in enumerate(nodes) if index > last and node.inputs]
    written = {output for node in all_rows for output in node.outputs}
    passed: dict[Buffer, Value] = {}
    for node in chosen_rows:
        for value in node.inputs:
            if value.buffer in written and value.buffer not in passed:
                passed[value.buffer] = Value(value.recorder, value.buffer, 0, (value.buffer.width,))
    return Halves(all_rows, chosen_rows, list(passed.values()))


def with_gathered_rows(halves: Halves, tables: list[Tensor], recorder: ProgramRecorder) -> list[Node]:
    """Return the second program, which begins by gathering the rows `token_ids` from the results of the first program.

    Args:
        halves: the halves of one recording.
        tables: where the first program writes `halves.passed`.
        recorder: recorder of the second program.
    """
    gathered = {value.buffer: Buffer(value.buffer.width) for value in halves.passed}
    nodes = [
        embedding_node(recorder.token_ids, table, gathered[value.buffer])
        for value, table in zip(halves.passed, tables, strict=True)
    ]
    for node in halves.chosen_rows:
        inputs = [replace(value, buffer=gathered.get(value.buffer, value.buffer)) for value in node.inputs]
        nodes.append(replace(node, inputs=inputs))
    return nodes
