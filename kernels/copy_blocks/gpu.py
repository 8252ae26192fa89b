"""`copy_blocks` on a GPU: one launch for all blocks of all buffers.

It accesses pinned host memory by its address, which is the same on the device. One launch takes a few microseconds; a
copy for each block of each layer would be thousands of launches.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.copy_blocks import WORD_BYTES
from octavo.kernels.dispatch import require

_WORDS = 1024
"""Words that a program copies at a time: 8 KiB."""


def copy_blocks(sources: Sequence[Tensor], destinations: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """See `octavo.kernels.copy_blocks.copy_blocks`.

    Raises:
        ShapeError: a buffer does not consist of complete words, or host memory is not pinned.
    """
    source, destination = sources[0].device, destinations[0].device
    device = destination if source.type == "cpu" else source  # in the interpreter both are the CPU
    for buffer in (*sources, *destinations):
        is_aligned = all(number % WORD_BYTES == 0 for number in (buffer.data_ptr(), buffer.stride(0), buffer.shape[1]))
        require(is_aligned, f"copy_blocks copies words of {WORD_BYTES} bytes, not blocks of {tuple(buffer.shape)}")
        is_reached = buffer.device == device or buffer.is_pinned()  # the interpreter's device is the CPU
        require(is_reached, "copy_blocks needs pinned host memory")
    rows = [
        [a.data_ptr(), a.stride(0) // WORD_BYTES, b.data_ptr(), b.stride(0) // WORD_BYTES, a.shape[1] // WORD_BYTES]
        for a, b in zip(sources, destinations, strict=True)
    ]
    numbers = torch.tensor([number for row in (*rows, *pairs) for number in row], dtype=torch.int64)
    if device.type == "cuda":
        numbers = numbers.pin_memory().to(device, non_blocking=True)
    _copy_blocks_kernel[(len(pairs), len(rows))](numbers, len(rows), WORDS=_WORDS)


@triton.jit(do_not_specialize=["num_buffers"])
def _copy_blocks_kernel(numbers_ptr, num_buffers, WORDS: tl.constexpr):
    """Copy one block of one buffer.

    The arguments are five numbers per buffer: source address, source stride in words, destination address, destination
    stride, and words of a block; and then two numbers per pair.
    """
    buffers_ptr, pairs_ptr = numbers_ptr, numbers_ptr + 5 * num_buffers
    pair, buffer = tl.program_id(0), tl.program_id(1)
    source_block = tl.load(pairs_ptr + 2 * pair)
    destination_block = tl.load(pairs_ptr + 2 * pair + 1)
    source = tl.load(buffers_ptr + 5 * buffer).to(tl.pointer_type(tl.int64))
    source += source_block * tl.load(buffers_ptr + 5 * buffer + 1)
    destination = tl.load(buffers_ptr + 5 * buffer + 2).to(tl.pointer_type(tl.int64))
    destination += destination_block * tl.load(buffers_ptr + 5 * buffer + 3)
    num_words = tl.load(buffers_ptr + 5 * buffer + 4)
    for start in range(0, num_words, WORDS):
        words = start + tl.arange(0, WORDS)
        is_word = words < num_words
        tl.store(destination + words, tl.load(source + words, mask=is_word), mask=is_word)
