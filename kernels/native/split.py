"""Splits a recorded model after the last operation that mixes rows, or that the ranks of other engines take part in.

The first part is computed for all rows of a step. The second part is needed only for rows whose logits are used: one
row of a prompt's last chunk, and none of earlier chunks. With 30 layers that saves most of one layer.
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
    """Whole buffers that the first program writes and the second reads."""


def split(nodes: list[Node], wanted: Sequence[Value] = ()) -> Halves:
    """Split after the last node that mixes rows; look-ups by the step's own ids stay in the first part.

    `wanted`: further results of the first part.
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
    """Return the second program: it begins with the rows that `token_ids` names, out of the first one's results.

    Args:
        halves: of one recording.
        tables: where the first program leaves `halves.passed`.
        recorder: of the second program.
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
