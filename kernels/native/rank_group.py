"""The processes of a tensor-parallel group, and the shared memory through which they exchange rows.

If the ranks are on several machines (nodes), each node has such a memory. The first ranks of the nodes synchronize it.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from socket import socket

import torch

from octavo.kernels.native.arguments import Arguments
from octavo.kernels.native.library import NativeLibrary

BARRIER_BYTES = 4096
"""Bytes before the two areas. They hold the barrier, which is one cache line, in a page of its own."""


class RankGroupArguments(Arguments):
    """See `RankGroup` in `rank_group.h`."""

    _fields_ = (
        ("barrier", ctypes.c_void_p),
        ("areas", ctypes.c_void_p),
        ("area_bytes", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("num_uses", ctypes.c_int64),
        ("num_local", ctypes.c_int64),
        ("links", ctypes.c_void_p),
    )


def group_bytes(area_bytes: int) -> int:
    """Return the bytes of a group whose largest exchange takes `area_bytes`, rounded up to pages."""
    return BARRIER_BYTES + 2 * _whole_pages(area_bytes)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class NodeLinksArguments(Arguments):
    """See `NodeLinks` in `node_links.h`."""

    _fields_ = (
        ("first_ranks", ctypes.c_void_p),
        ("sockets", ctypes.c_void_p),
        ("num_nodes", ctypes.c_int64),
        ("node", ctypes.c_int64),
    )


class NodeLinks:
    """The connections of this rank's node to the others.

    Args:
        first_ranks: first rank of each node, in order; and then the number of ranks.
        node: index of this rank's node.
        sockets: connected to the first rank of each node, by its index; {} for ranks that are not the first of a node.
    """

    def __init__(self, first_ranks: Sequence[int], node: int, sockets: dict[int, socket]) -> None:
        num_nodes = len(first_ranks) - 1
        self.num_local = first_ranks[node + 1] - first_ranks[node]
        self._sockets = sockets  # kept open
        self._first_ranks = (ctypes.c_int64 * len(first_ranks))(*first_ranks)
        self._descriptors = (ctypes.c_int32 * num_nodes)(
            *(sockets[other].fileno() if other in sockets else -1 for other in range(num_nodes))
        )
        self._arguments = NodeLinksArguments(
            ctypes.addressof(self._first_ranks), ctypes.addressof(self._descriptors) if sockets else 0, num_nodes, node
        )

    @property
    def address(self) -> int:
        """Address of the C++ structure, valid while this object lives."""
        return ctypes.addressof(self._arguments)


class SharedMemoryGroup:
    """This process's membership in a group. Every rank must run the same operations on the group in the same order.

    Args:
        library: library of the operations; every rank must have built it from the same sources.
        descriptor: descriptor of a file of zeros that all ranks inherit. The file grows here.
        rank: rank of this process, from 0.
        size: number of ranks.
        area_bytes: bytes of the largest exchange.
        offset: offset of the group's memory in the file, a multiple of the page size.
        links: connections to the other nodes; `None` if all ranks are on this machine.

    Raises:
        OSError: the memory cannot be mapped.
    """

    def __init__(
        self,
        library: NativeLibrary,
        descriptor: int,
        rank: int,
        size: int,
        area_bytes: int,
        *,
        offset: int = 0,
        links: NodeLinks | None = None,
    ) -> None:
        self.library = library
        self.rank = rank
        self.size = size
        self.area_bytes = _whole_pages(area_bytes)
        num_bytes = group_bytes(area_bytes)
        if os.fstat(descriptor).st_size < offset + num_bytes:
            os.ftruncate(descriptor, offset + num_bytes)  # sparse: a page takes memory when it is first written
        self._memory = torch.frombuffer(mmap.mmap(descriptor, num_bytes, offset=offset), dtype=torch.uint8)
        address = self._memory.data_ptr()
        self._links = links
        self._arguments = RankGroupArguments(
            address,
            address + BARRIER_BYTES,
            self.area_bytes,
            rank,
            size,
            0,
            links.num_local if links else size,
            links.address if links else 0,
        )
        library.operation("rank_group", RankGroupArguments)  # checks the size
        library.function("rank_group", [ctypes.c_void_p])(self.address)
        self._barrier = library.function("meet_ranks", [ctypes.c_void_p])

    @property
    def address(self) -> int:
        """Address of the C++ structure. Operations that use it must keep this object alive."""
        return ctypes.addressof(self._arguments)

    @property
    def areas(self) -> tuple[int, int]:
        """Addresses of the two areas, for operations that divide the areas themselves."""
        first = self._arguments.areas
        return first, first + self.area_bytes

    def barrier(self) -> None:
        """Wait for the other ranks. Blocks until all of them have called it."""
        self._barrier(self.address)
