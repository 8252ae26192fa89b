"""One end of the memory through which two consecutive pipeline stages pass rows."""

import ctypes
import mmap
import os

import torch

from octavo.kernels.native.arguments import Arguments

NUM_AREAS = 2
"""Maximum steps that the sending stage is ahead: one area is read while the next is written."""
_COUNTER_BYTES = mmap.PAGESIZE


class StageLinkArguments(Arguments):
    """See `StageLink` in `native.h`."""

    _fields_ = (
        ("counters", ctypes.c_void_p),
        ("areas", ctypes.c_void_p),
        ("area_bytes", ctypes.c_int64),
        ("num_areas", ctypes.c_int64),
        ("num_steps", ctypes.c_int64),
    )


def link_bytes(area_bytes: int) -> int:
    """Return the bytes of a link whose largest step takes `area_bytes`: whole pages."""
    return _COUNTER_BYTES + NUM_AREAS * _whole_pages(area_bytes)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedMemoryLink:
    """The sender's or the receiver's end.

    Args:
        descriptor: descriptor of a file of zeros that both processes inherit. A file that is too short is extended.
        offset: offset of the link in the file, a multiple of the page size.
        area_bytes: bytes of the largest step.

    Raises:
        OSError: the memory cannot be mapped.
    """

    def __init__(self, descriptor: int, offset: int, area_bytes: int) -> None:
        num_bytes = link_bytes(area_bytes)
        if os.fstat(descriptor).st_size < offset + num_bytes:
            os.ftruncate(descriptor, offset + num_bytes)  # sparse: a page takes memory when it is first written to
        self._memory = torch.frombuffer(mmap.mmap(descriptor, num_bytes, offset=offset), dtype=torch.uint8)
        self.area_bytes = _whole_pages(area_bytes)
        address = self._memory.data_ptr()
        self._arguments = StageLinkArguments(address, address + _COUNTER_BYTES, self.area_bytes, NUM_AREAS, 0)

    @property
    def address(self) -> int:
        """Address of the link's structure for C++. Operations that use it must keep this object alive."""
        return ctypes.addressof(self._arguments)
