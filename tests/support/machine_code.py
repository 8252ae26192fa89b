"""Reads loops from disassembled kernels."""

import heapq
import re
from collections import Counter

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(.*)")


def loops(disassembly: str, instruction: str) -> list[Counter[str]]:
    """Return the instructions, by their names, of the shortest cycle through each block that has `instruction`.

    The shortest is first. In a flattened loop that is an iteration that neither begins nor ends a tile.
    """
    blocks, successors = _blocks(disassembly)
    cycles = [_cycle(blocks, successors, index) for index, block in enumerate(blocks) if instruction in block]
    assert any(cycles), f"{instruction} is in no loop"
    return [Counter(cycle) for cycle in sorted(filter(None, cycles), key=len)]


def _cycle(blocks: list[list[str]], successors: list[list[int]], start: int) -> list[str]:
    """Return the instructions of the shortest cycle through a block; none: it is in no loop."""
    queue = [(len(blocks[start]), start, blocks[start])]
    seen = set()
    while queue:
        _, index, path = heapq.heappop(queue)
        for after in successors[index]:
            if after == start:
                return path
            if after not in seen:
                seen.add(after)
                longer = path + blocks[after]
                heapq.heappush(queue, (len(longer), after, longer))
    return []


def _blocks(disassembly: str) -> tuple[list[list[str]], list[list[int]]]:
    """Return the basic blocks, as names of instructions, and the blocks that may follow each."""
    blocks: list[list[str]] = [[]]
    starts: dict[str, int] = {}
    targets: dict[int, str] = {}
    falls_through: dict[int, bool] = {}
    for line in disassembly.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            if blocks[-1]:
                blocks.append([])
            starts[label[1]] = len(blocks) - 1
        elif found := _INSTRUCTION.search(line):
            name, operands = found[1], found[2]
            blocks[-1].append(name)
            if name in ("BRA", "EXIT", "RET"):
                index = len(blocks) - 1
                if target := re.search(r"\((\.L_x_\d+)\)", operands):
                    targets[index] = target[1]
                falls_through[index] = "@" in found[0] or operands.startswith(".U ")
                blocks.append([])
    successors: list[list[int]] = []
    for index in range(len(blocks)):
        after = [starts[targets[index]]] if index in targets else []
        if falls_through.get(index, True) and index + 1 < len(blocks):
            after.append(index + 1)
        successors.append(after)
    return blocks, successors
