"""Media items: inputs of a prompt, such as images, whose rows are computed by an encoder in the workers.

The core reads spans and digests. It passes tensors on without reading their values.
"""

import hashlib
import math
from collections.abc import Container, Mapping, Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from octavo.protocol.buffers import MAX_BUFFERS_BYTES, Buffer
from octavo.protocol.ids import SlotId
from octavo.protocol.prompt_embeds import Span

Kind = Literal["image", "video", "audio"]
"""The kind of an item: a key of `multi_modal_data` and of `--limit-mm-per-prompt`. Selects the encoder."""

DIGEST_BYTES = 32

BESIDE_IMAGES = "beside_images"
"""Name of an audio tensor, of any value, that is present if the prompt also has images and the audio rows then
differ."""

LEVELS = "levels"
"""Name of a tensor of an image with byte pixels: the float32 values of the bytes, of shape (channels, 256)."""

NUM_AXES = 3
"""Number of axes of a grid: frames, rows and columns."""

MAX_POSITIONS = 2**16
"""Most positions of an item's grid on an axis."""

PRECOMPUTED_ROWS = "rows"
"""Name of the only tensor of an item whose rows were computed by the caller and are not encoded."""

MAX_ITEM_BYTES = MAX_BUFFERS_BYTES // 2
"""Most bytes in all tensors of one item, and in all items that one step encodes."""


class MediaTensor(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """An array made by a processor, in C order, little-endian."""

    dtype: str
    """The name of the type in numpy: "float32", "int64"."""
    shape: list[int]
    data: Buffer


class MediaItem(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """One image or other input of a prompt."""

    spans: list[Span]
    """Spans of prompt positions that hold its rows, in order and without overlap. Other tokens may lie between them."""
    digest: bytes
    """Items with equal digests have equal rows and equal grids."""
    tensors: dict[str, MediaTensor]
    """Tensors by the names that the processor gives them."""
    grid: list[int] = []
    """Frames, rows and columns of its rows, for models that count positions on several axes. The item then has one
    span, or one per frame. Empty if its rows are a sequence."""
    attended_rows: int = 0
    """Number of rows that every token of the request attends to (cross-attention). The item then has no spans."""
    is_both_ways: bool = False
    """Whether the rows of a span attend to each other in both directions, so that one step must compute them all."""
    kind: Kind = "image"
    frame_step: float = 1.0
    """Positions between two frames of the grid, rounded down for each frame."""
    continues_grid: bool = False
    """Whether its frames continue the grid of the previous item: both are parts of the same video."""

    @property
    def grids(self) -> list["GridSpan"]:
        """Its grid, or one grid per frame if other tokens lie between the frames."""
        if self.grid and len(self.spans) > 1:
            return [GridSpan(position, [1, *self.grid[1:]]) for position, _ in self.spans]
        return [GridSpan(self.start, self.grid, self.frame_step)] if self.grid else []

    @property
    def num_rows(self) -> int:
        """Number of rows that the encoder returns for the item: those of all spans, or the attended ones."""
        return self.attended_rows or sum([num_rows for _, num_rows in self.spans])

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum([len(tensor.data) for tensor in self.tensors.values()])

    @property
    def start(self) -> int:
        """The first position whose hidden states depend on the item."""
        return 0 if self.attended_rows else self.spans[0][0]

    @property
    def end(self) -> int:
        """The position after the last row."""
        position, num_rows = self.spans[-1]
        return position + num_rows


class GridSpan(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The grid of an item, in a request that enters the batch."""

    start: int
    """The first position."""
    grid: list[int]
    frame_step: float = 1.0


def grids_of(items: Sequence[MediaItem]) -> list[GridSpan]:
    """Return the grids of a prompt. Consecutive items of the same video form one grid."""
    grids: list[GridSpan] = []
    for item in items:
        if item.continues_grid and grids:
            start, (frames, rows, columns), frame_step = msgspec.structs.astuple(grids.pop())
            grids.append(GridSpan(start, [frames + item.grid[0], rows, columns], frame_step))
        else:
            grids += item.grids
    return grids


class EncoderInput(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """An item that a step encodes."""

    digest: bytes
    num_rows: int
    """Number of rows of the encoder output."""
    tensors: dict[str, MediaTensor]
    kind: Kind = "image"


class StepMedia(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The media rows that one step uses, and what must be encoded before."""

    evicted: list[bytes]
    """Digests whose rows the workers evict first."""
    inputs: list[EncoderInput]
    """Items to encode next. The outputs are kept until they are evicted."""
    places: list[tuple[SlotId, int, int, int, int]]
    """Slot, first position, number of rows, index in `digests`, and index of the first of these rows in the encoder
    output."""
    digests: list[bytes]
    attended: list[tuple[SlotId, int]] = []
    """Slot, and index in `digests`: the request attends to this item from now on (cross-attention)."""


def digest_of(tensors: Mapping[str, MediaTensor], grid: Sequence[int] = ()) -> bytes:
    """Return the digest of an item: of the names, types, shapes and bytes of its tensors.

    `grid` is the item's grid if it does not follow from the tensors: the hidden states depend on the positions too.
    """
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    if grid:
        found.update(f"grid {list(grid)} ".encode())
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tensor.shape} ".encode())
        found.update(tensor.data.data)
    return found.digest()


def media_fault(
    items: Sequence[MediaItem], num_prompt_tokens: int, kinds: Container[Kind], attended_rows: int = 0
) -> str | None:
    """Return why these cannot be the media of a prompt with this many positions. Return None if they can.

    `kinds`: the kinds that the model reads. `attended_rows`: number of rows if the model attends to one item
    (cross-attention); 0 if items are rows of the prompt.
    """
    if unread := {item.kind for item in items if item.kind not in kinds}:
        return f"the model of this engine does not read media of kind {', '.join(sorted(unread))}"
    if attended_rows:
        if len(items) != 1 or items[0].attended_rows != attended_rows or items[0].spans:
            return f"this model transcribes audio: each request needs one audio clip, which has {attended_rows} rows"
        return _digest_or_size_fault(items)
    spans = [span for item in items for span in item.spans]
    if any(item.attended_rows for item in items):
        return "this model attends to no media items beside the prompt"
    if any(not item.spans for item in items) or any(num_rows < 1 for _, num_rows in spans):
        return "a media item has no rows"
    ends = [(0, 0), *spans, (num_prompt_tokens, 0)]
    if any(before + num_rows > after for (before, num_rows), (after, _) in pairwise(ends)):
        return f"rows of media overlap, or lie outside of the {num_prompt_tokens} positions of the prompt"
    if any(item.grid and not _is_grid_of(item) for item in items):
        return "the grid of a media item is not that of its rows"
    neighbours = zip([None, *items], items, strict=False)
    if any(item.continues_grid and not _continues(before, item) for before, item in neighbours):
        return "a media item does not continue the grid of the one before it"
    if any(one.grid[0] * one.frame_step > MAX_POSITIONS for one in grids_of(items)):
        return f"the grid of a media item takes more than {MAX_POSITIONS} positions"
    return _digest_or_size_fault(items)


def given_fault(items: Sequence[MediaItem], dtype: str, width: int) -> str | None:
    """Return why rows computed by the caller do not fit the model. Return None if they do.

    Args:
        items: the media of a prompt.
        dtype: data type of the model.
        width: values per row; 0 if the engine accepts no such rows.
    """
    num_bytes = width * (4 if dtype == "float32" else 2)
    for item in items:
        if (rows := item.tensors.get(PRECOMPUTED_ROWS)) is None:
            continue
        if not width:
            return "this engine takes no embeddings of media: start it with --enable-mm-embeds"
        has_shape = rows.dtype == dtype and rows.shape == [item.num_rows, width] and len(item.tensors) == 1
        if not has_shape or len(rows.data) != item.num_rows * num_bytes:
            return f"embeddings of media must be {dtype} of shape [{item.num_rows}, {width}], got {rows.shape}"
    return None


def _digest_or_size_fault(items: Sequence[MediaItem]) -> str | None:
    if any(len(item.digest) != DIGEST_BYTES for item in items):
        return f"digests of media have {DIGEST_BYTES} bytes"
    if any(item.num_bytes > MAX_ITEM_BYTES for item in items):
        return f"a media item has more than {MAX_ITEM_BYTES} bytes"
    return None


def _is_grid_of(item: MediaItem) -> bool:
    if len(item.grid) != NUM_AXES or min(item.grid) < 1 or math.prod(item.grid) != item.num_rows:
        return False
    frames, rows, columns = item.grid
    if len(item.spans) > 1 and [num_rows for _, num_rows in item.spans] != [rows * columns] * frames:
        return False
    return 0 <= frames * item.frame_step <= MAX_POSITIONS  # false for NaN


def _continues(before: MediaItem | None, item: MediaItem) -> bool:
    if before is None or not before.grid or not item.grid:
        return False
    is_next = len(before.spans) == len(item.spans) == 1 and before.end == item.start
    same = [(one.kind, one.grid[1:], one.frame_step) for one in (before, item)]
    return is_next and same[0] == same[1]
