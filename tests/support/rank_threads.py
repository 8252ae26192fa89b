"""The ranks of a group as threads of this process, with the shared memory that processes would use."""

import contextlib
import faulthandler
import functools
import itertools
import mmap
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar
from unittest import mock

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.rank_group import NodeLinks, SharedMemoryGroup

Result = TypeVar("Result")

TIMEOUT_S = 120.0


@contextlib.contextmanager
def one_mapping() -> Iterator[None]:
    """Map each shared memory only once for all its ends: ThreadSanitizer identifies memory by address."""
    with mock.patch.object(mmap, "mmap", functools.cache(mmap.mmap)):
        yield


def on_ranks(
    library: NativeLibrary,
    size: int,
    area_bytes: int,
    compute: Callable[[SharedMemoryGroup], Result],
    first_ranks: Sequence[int] = (),
) -> list[Result]:
    """Call `compute` on as many threads as there are ranks, and return the result of each.

    Args:
        library: library of the operations.
        size: number of ranks.
        area_bytes: size of the largest exchange, in bytes.
        compute: called with each rank's group.
        first_ranks: first ranks of nodes that share no memory, and the number of ranks; (): all ranks share it.
    """
    nodes = list(first_ranks) or [0, size]
    with contextlib.ExitStack() as stack:
        sockets = _connected(len(nodes) - 1, stack)
        groups = []
        for node, (first, last) in enumerate(itertools.pairwise(nodes)):
            descriptor = os.memfd_create("ranks")
            stack.callback(os.close, descriptor)
            with one_mapping():
                for rank in range(first, last):
                    links = NodeLinks(nodes, node, sockets[node] if rank == first else {}) if first_ranks else None
                    groups.append(SharedMemoryGroup(library, descriptor, rank, size, area_bytes, links=links))
        threads = ThreadPoolExecutor(size)
        try:
            return _results([threads.submit(compute, group) for group in groups])
        finally:
            threads.shutdown(wait=False)


def _results(ranks: list[Future[Result]]) -> list[Result]:
    """Return the results of the ranks. A failing rank leaves the others waiting for it, so raise its error."""
    done, waiting = wait(ranks, TIMEOUT_S, FIRST_EXCEPTION)
    failed = next((rank for rank in done if rank.exception()), None)
    if waiting and failed is None:
        faulthandler.dump_traceback(2)
    return [rank.result(timeout=0) for rank in ([failed] if failed else ranks)]


def _connected(num_nodes: int, stack: contextlib.ExitStack) -> list[dict[int, socket.socket]]:
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(num_nodes)]
    for one, other in itertools.combinations(range(num_nodes), 2):
        sockets[one][other], sockets[other][one] = pair = socket.socketpair()
        for end in pair:
            stack.enter_context(end)
    return sockets
