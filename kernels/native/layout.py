"""Plans the memory of a program's buffers, and the barriers between its threads. Allocates nothing.

Time is counted in phases. A phase is either a run of row-wise operations without barriers, or one other operation,
possibly together with an early operation after it. Within a phase, threads may be several operations apart. So two
buffers share memory only if their phases are disjoint.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from octavo.kernels.native.value import Buffer, Node, Value

ALIGNMENT = 64
"""Bytes of a cache line. Rows are aligned to it, so that no two threads write to the same cache line."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The memory plan of one arena."""

    offsets: dict[Buffer, int]
    num_bytes: int
    waits: list[bool]
    """For each node, whether a barrier follows it."""


def row_bytes(buffer: Buffer) -> int:
    """Return the stride between the rows of a buffer, in bytes.

    For bfloat16 the stride is an odd number of cache lines. Matrix registers read 16 rows at once; with a stride of a
    large power of two, these rows would share a few sets of the L1 cache and evict one another.
    """
    num_lines = -(-buffer.width * buffer.type.itemsize // ALIGNMENT)
    return (num_lines | 1 if buffer.type == torch.bfloat16 else num_lines) * ALIGNMENT


def lay_out(nodes: list[Node], results: Iterable[Value], max_rows: int) -> Layout:
    """Place every buffer, first fit in the order of first use. The memory of results is never reused."""
    phases = _phases(nodes)
    last_use = {output: phase for node, phase in zip(nodes, phases, strict=True) for output in node.outputs}
    for node, phase in zip(nodes, phases, strict=True):
        last_use |= {value.buffer: phase for value in node.inputs}
    last_use |= {value.buffer: phases[-1] + 1 for value in results}
    offsets: dict[Buffer, int] = {}
    living: dict[int, tuple[int, int]] = {}  # offset -> (size, phase of the last use)
    kept = {value.buffer for value in results}
    num_bytes = 0
    for index, (node, phase) in enumerate(zip(nodes, phases, strict=True)):
        living = {offset: place for offset, place in living.items() if place[1] >= phase}
        for output in node.outputs:
            shared = _shared(node, nodes[index + 1 :]) if output is node.outputs[0] else None
            if shared is not None and shared not in kept:
                offset = offsets[shared]
            else:
                offset = _first_fit(living, max_rows * row_bytes(output))
            offsets[output] = offset
            living[offset] = (max_rows * row_bytes(output), last_use[output])
            num_bytes = max(num_bytes, offset + max_rows * row_bytes(output))
    waits = [here != after for here, after in zip(phases, [*phases[1:], -1], strict=True)]
    return Layout(offsets, num_bytes, waits)


def _phases(nodes: list[Node]) -> list[int]:
    phases: list[int] = []
    for index, node in enumerate(nodes):
        continues = index > 0 and node.is_row_wise and nodes[index - 1].is_row_wise
        if node.is_early and index > 0 and not nodes[index - 1].mixes_rows:
            read = {value.buffer for value in node.inputs}
            present = itertools.takewhile(lambda place: phases[place] == phases[-1], reversed(range(index)))
            continues = read.isdisjoint(output for place in present for output in nodes[place].outputs)
        phases.append(phases[-1] + (not continues) if phases else 0)
    return phases


def _shared(node: Node, later: list[Node]) -> Buffer | None:
    """Return the buffer that the first output can overwrite: a complete one, with rows of equal size, not read
    later."""
    if node.in_place is None:
        return None
    value, output = node.inputs[node.in_place], node.outputs[0]
    buffer = value.buffer
    if value.width != buffer.width or (buffer.width, buffer.type) != (output.width, output.type):
        return None
    readers = [*later, *([node] * (sum(other.buffer is buffer for other in node.inputs) - 1))]
    return None if any(other.buffer is buffer for reader in readers for other in reader.inputs) else buffer


def _first_fit(living: dict[int, tuple[int, int]], size: int) -> int:
    offset = 0
    for start, (taken, _) in sorted(living.items()):
        if offset + size <= start:
            break
        offset = max(offset, start + taken)
    return offset
