"""`MediaTower`: an encoder whose inputs are patches of images, and whose results are rows of prompts.

Runs like a text encoder: an image is a request whose positions attend to each other, with given rows instead of tokens.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.kernels.given_rows import all_given_rows
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.memory import allocate
from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import MediaFacts
from octavo.protocol.errors import ProtocolError
from octavo.protocol.media import LEVELS, MediaTensor
from octavo.worker_proc.batch.inputs import Ints
from octavo.worker_proc.device.stream import Stream, upload_array
from octavo.worker_proc.models.base import Layer, LayeredModel, Residual, Tables
from octavo.worker_proc.models.hf_config import CheckedConfig, optional
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    """One sequence of the encoder, whose positions attend only to each other."""

    rows_TP: Floats
    """The values of each patch. For an audio clip: its spectrogram."""
    positions_T: Ints
    """Row of the position table for each patch."""
    chosen_R: Ints
    """Positions whose results become rows of the prompt."""
    tables: tuple[Floats, ...] = ()
    """Further inputs for each patch, such as rotary angles, in the widths that the tower declares."""
    num_keys: int | None = None
    """Number of leading positions that are attended to. The others attend to them too, but are attended to by none.
    `None` means all positions."""
    part_lengths: Ints | None = None
    """Lengths of consecutive parts. Layers with `AttentionShape.is_local` attend within a part. `None` means one
    part."""


@dataclass(frozen=True, slots=True, eq=False)
class TowerSpec:
    """What a tower is built for."""

    facts: MediaFacts
    width: int
    """Width of the language model."""
    placement: Placement
    """Placement of the parameters."""
    library: NativeLibrary | None
    """Library that computes; `None` if torch does."""
    max_item_tokens: int
    """Most prompt rows of an image, for images of variable size."""


@dataclass(frozen=True, slots=True, eq=False)
class MergedProjection:
    """Makes one row of the prompt from several neighbours, which are adjacent in `Patches`."""

    num_merged: int
    project: Callable[[Tensor], Tensor]
    """Maps `num_merged` adjacent results of the tower to one row of the prompt."""
    deeper: Sequence[Callable[[Tensor], Tensor]] = ()
    """Functions that map each of `MediaTower.features` to a further row, which the language model adds after one of
    its first layers (DeepStack)."""
    learned_XD: Tensor | None = None
    """Learned results, such as that of a line's end. `MediaTower.arrange` gets their prompt rows after those of an
    item. `None` if there are none."""


class MediaTower(LayeredModel):
    """Layers over patches, and a projector.

    Args:
        parameters: parameters of all parts.
        shapes: shapes of the attention of each layer.
        width: width of the residual stream.
        patch_width: number of values of a patch.
        max_item_rows: most patches of an image.
        max_parts: most parts (`Patches.part_lengths`) of a run whose sequences have several; 0 if they have one.
        table_widths: number of values of a patch in each of `Patches.tables`.
        embed: maps patches and positions to the residual stream.
        layers: layers in order.
        project: maps the residual stream to rows of the prompt, or to the input of `merged`.
        library: library that computes; `None` if torch does.
        merged: makes prompt rows from several results; `None` if each result is one.
    """

    def __init__(
        self,
        parameters: Parameters,
        shapes: Sequence[AttentionShape],
        *,
        width: int,
        patch_width: int,
        max_item_rows: int,
        embed: Callable[[Tensor, Tensor], Tensor],
        layers: Sequence[Layer],
        project: Callable[[Tensor], Tensor],
        library: NativeLibrary | None,
        merged: MergedProjection | None = None,
        max_parts: int = 0,
        table_widths: Sequence[int] = (),
    ) -> None:
        super().__init__(parameters, shapes)
        self.library = library
        self.layers = layers
        self.max_item_rows = max_item_rows
        is_on_gpu = self.device.type == "cuda"
        least_rows = MIN_RUN_ROWS_OF_GPU if is_on_gpu else MIN_RUN_ROWS
        self.max_rows, self.max_parts = max(max_item_rows, least_rows), max_parts
        self._embed, self._project = embed, project
        self.merged, self.width = merged, width
        self._patch_width, self._table_widths = patch_width, table_widths
        self._inputs_XP, self._tables = torch.empty(0), [torch.empty(0)] * len(table_widths)
        if not is_on_gpu:
            # Native programs pass float32 rows on, at fixed addresses.
            self._inputs_XP = self._memory(patch_width, torch.float32 if library else self.dtype)
            self._tables = [self._memory(width, torch.float32) for width in table_widths]

    @abstractmethod
    def patches(self, tensors: Mapping[str, MediaTensor]) -> Iterable[Patches]:
        """Return the sequences of an item.

        Raises:
            ProtocolError: these are not tensors of the model's processor.
        """

    def arrange(self, rows_RD: Tensor, tensors: Mapping[str, MediaTensor]) -> Tensor:
        """Return the prompt rows of an item.

        Args:
            rows_RD: rows of all its sequences, one after another, and those of `MergedProjection.learned_XD`.
            tensors: tensors of the item.
        """
        return rows_RD

    def put(self, sequences: Sequence[Patches]) -> None:
        """Set the patches of the next run, which reads them row by row."""
        _copy(self._inputs_XP, [one.rows_TP for one in sequences])
        for index, table_XC in enumerate(self._tables):
            _copy(table_XC, [one.tables[index] for one in sequences])

    def send(self, sequences: Sequence[Patches], stream: Stream) -> None:
        """See `put`, but on a device, after the work of the stream so far."""
        self._inputs_XP = upload_array(stream, np.concatenate([one.rows_TP for one in sequences])).to(self.dtype)
        tables = zip(*[one.tables for one in sequences], strict=True)
        self._tables = [upload_array(stream, np.concatenate(parts)) for parts in tables]

    def blank(self, num_rows: int) -> Patches:
        """Return a sequence of zeros, to compile kernels and to measure memory."""
        tables = tuple(np.zeros((num_rows, width), dtype=np.float32) for width in self._table_widths)
        rows_TP = np.zeros((num_rows, self._patch_width), dtype=np.float32)
        return Patches(rows_TP, np.zeros(num_rows, dtype=np.int64), np.arange(num_rows), tables)

    def _memory(self, width: int, dtype: torch.dtype) -> Tensor:
        num_bytes = self.max_rows * width * dtype.itemsize
        return allocate(num_bytes)[:num_bytes].view(dtype).view(self.max_rows, width)

    def prepare(self, max_model_len: int) -> None:
        """See `octavo.worker_proc.models.base.Model`; tables are made when the weights are there."""

    def begin(self, token_ids_T: Tensor, positions_T: Tensor) -> tuple[Residual, Tables]:
        """See `octavo.worker_proc.models.base.LayeredModel`."""
        patches_TP = all_given_rows(token_ids_T, self._inputs_XP)
        tables = tuple(all_given_rows(token_ids_T, table_XC) for table_XC in self._tables)
        return Residual(self._embed(patches_TP, positions_T)), tables

    def end(self, residual: Residual) -> Tensor:
        """See `octavo.worker_proc.models.base.LayeredModel`."""
        return residual.total()

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Return prompt rows for rows of the last layer."""
        return self._project(hidden_RD)


def _copy(target_XC: Tensor, parts: Sequence[Floats]) -> None:
    rows_TC = torch.from_numpy(np.concatenate(parts))
    target_XC[: len(rows_TC)] = rows_TC


MIN_RUN_ROWS, MIN_RUN_ROWS_OF_GPU = 1024, 8192
"""Small images share runs of at least this many rows."""
MAX_RUN_SEQUENCES = 64
"""Most sequences of one run."""


def array_of(tensors: Mapping[str, MediaTensor], name: str, dtype: Any, num_dimensions: int) -> npt.NDArray[Any]:
    """Return a tensor of an item.

    Raises:
        ProtocolError: there is no tensor of this name, type and number of dimensions.
    """
    tensor = tensors.get(name)
    if tensor is None or tensor.dtype != np.dtype(dtype).name or len(tensor.shape) != num_dimensions:
        found = "none" if tensor is None else f"{tensor.dtype} {tensor.shape}"
        raise ProtocolError(
            f"a media item needs {name}, {np.dtype(dtype).name} of {num_dimensions} dimensions: {found}"
        )
    array: npt.NDArray[Any] = np.frombuffer(tensor.data.data, dtype=dtype).reshape(tensor.shape)
    return array


def pixels_of(tensors: Mapping[str, MediaTensor], name: str, num_dimensions: int) -> Floats:
    """Return the pixels of an item: images (shape ...CHW), or their patches (shape TP, channel by channel).

    Raises:
        ProtocolError: there are no pixels of this name and number of dimensions.
    """
    if LEVELS not in tensors:
        pixels: Floats = array_of(tensors, name, np.float32, num_dimensions)
        return pixels
    levels_CL = array_of(tensors, LEVELS, np.float32, 2)
    bytes_ = array_of(tensors, name, np.uint8, num_dimensions)
    num_channels, num_pictures = len(levels_CL), math.prod(bytes_.shape[: max(num_dimensions - 3, 1)])
    if levels_CL.shape[1] != 256 or bytes_.size % (num_pictures * num_channels):
        raise ProtocolError(f"levels of shape {levels_CL.shape} for bytes of shape {bytes_.shape}")
    bytes_NCX = bytes_.reshape(num_pictures, num_channels, -1)
    pixels = np.empty(bytes_NCX.shape, dtype=np.float32)
    step = max(1, _MOST_LOOKED_UP // bytes_NCX.shape[2])
    for first in range(0, num_pictures, step):
        for channel, levels_L in enumerate(levels_CL):
            own = slice(first, first + step), channel
            pixels[own] = levels_L.take(bytes_NCX[own], mode="clip")
    return pixels.reshape(bytes_.shape)


_MOST_LOOKED_UP = 2**18
"""Bytes per lookup: numpy's indices take eight times as much, which fits into the processor's cache."""


def square_patches(pixels_CHW: Floats, size: int) -> Floats:
    """Return the patches of an image, row by row, in the input order of a convolution weight: shape TP."""
    channels, height, width = pixels_CHW.shape
    rows, columns = height // size, width // size
    cut = pixels_CHW[:, : rows * size, : columns * size].reshape(channels, rows, size, columns, size)
    patches: Floats = np.ascontiguousarray(cut.transpose(1, 3, 0, 2, 4)).reshape(rows * columns, -1)
    return patches


def places_of_patches(height: int, width: int, merge_size: int) -> Ints:
    """Return the row and the column of each patch of a frame, whose squares are in row order: shape 2T."""
    places = np.indices((height, width)).reshape(2, height // merge_size, merge_size, -1, merge_size)
    in_order: Ints = places.transpose(0, 1, 3, 2, 4).reshape(2, -1)
    return in_order


def order_by_square(side: int, merge_size: int) -> Ints:
    """Return the row-by-row indices of a square image's patches, in order of squares."""
    rows_T, columns_T = places_of_patches(side, side, merge_size)
    order_T: Ints = rows_T * side + columns_T
    return order_T


def theta_of(config: CheckedConfig) -> float:
    """Return the base of the rotary angles; older files have it as a top-level key."""
    rope: dict[str, Any] = optional(config, "rope_parameters", {})
    return float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
