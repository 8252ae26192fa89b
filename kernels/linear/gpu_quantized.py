"""Products with quantized weights on a GPU: launches the kernels of `gpu_quantized_kernels`.

A row has the same bits in any batch. Rows are quantized to 8 bits if the checkpoint requires it and the GPU multiplies
such numbers. Otherwise the weight's codes are converted to the dtype of the rows.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from octavo.kernels.linear.gpu_quantized_kernels import Form, quantized_linear_kernel
from octavo.kernels.linear.gpu_quantized_layout import (
    BASES,
    TILE_OUTPUTS,
    GpuQuantizedWeight,
    Kind,
    assembly,
    pack,
    pieces_of,
)
from octavo.kernels.linear.gpu_quantized_rows import quantize_rows
from octavo.kernels.linear.gpu_tiles import Gpu
from octavo.kernels.linear.quantized import QuantizedWeight
from octavo.kernels.programmatic_launch import launch_options

_DESCRIPTIONS: dict[Kind, str] = {
    "u4": "4-bit levels",
    "e2m1": "4-bit floats",
    "u8": "8-bit levels",
    "e4m3": "8-bit floats",
    "s8": "8-bit levels and rows with one scale each",
    "f8": "8-bit floats and rows of 8-bit floats",
}
_MAX_SPLITS = 8
_LEAST_INPUTS = 512
"""Minimum inputs of a split: fewer would not fill the pipeline."""
_SHARING = 1.5
"""From this average number of programs per multiprocessor, most programs are assumed to share one."""
_ALONE_COST = 1.4
"""Assumed relative time of a program that has a multiprocessor to itself, because nothing else runs while it waits."""
_END_BLOCKS = 1.5
"""Assumed time of a program's epilogue, in units of one block of inputs."""
ROWS = (16, 32, 64, 128)
"""Possible row counts of a tile."""
_MOST_ROWS_OF_STEPS = 32
"""Maximum rows of a tile whose iterations multiply two blocks of inputs; larger tiles lack registers."""
_LEAST_STAGES_OF_STEPS = 3
"""Minimum stages for iterations of two blocks: with two stages, fewer bytes would be in flight than with more stages
of one block."""
_FLOAT8_CAPABILITY = (8, 9)
_MAJOR_WITHOUT_KERNELS = 10
_TYPES = {
    torch.bfloat16: triton.language.bfloat16,
    torch.float16: triton.language.float16,
    torch.float32: triton.language.float32,
    torch.int16: triton.language.int16,
    torch.int8: triton.language.int8,
    torch.float8_e4m3fn: triton.language.float8e4nv,
}


@dataclass(frozen=True, slots=True)
class QuantizedLaunch:
    """The launch of a product with some number of rows."""

    rows: int
    """Rows of a tile."""
    num_tiles: int
    num_splits: int
    is_spread: bool
    """Whether each split of a tile has its own program, instead of one program for all splits."""
    num_warps: int
    step: int
    """Blocks of inputs that one iteration multiplies."""
    num_stages: int


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedProduct:
    """A quantized weight that our kernels multiply."""

    weight: GpuQuantizedWeight
    bias_O: Tensor | None
    gpu: Gpu
    num_done: Tensor
    """Number of finished splits of each tile; int32, zero between calls."""

    @classmethod
    def new(
        cls, weight: QuantizedWeight, bias_O: Tensor | None, dtype: torch.dtype, device: torch.device, gpu: Gpu
    ) -> "QuantizedProduct | None":
        """Return the product on a device; `None` if no kernel multiplies with this format."""
        if not has_kernels(device):
            return None
        packed = pack(weight, dtype, device, has_float8=has_float8(device))
        if packed is None:
            return None
        num_done = torch.zeros(gpu.num_multiprocessors, dtype=torch.int32, device=device)
        return cls(packed, None if bias_O is None else bias_O.to(device), gpu, num_done)

    @property
    def num_bytes(self) -> int:
        """Size of the packed weight in bytes."""
        return self.weight.num_bytes

    @property
    def description(self) -> str:
        """Formats of the weight and rows, for the log."""
        return _DESCRIPTIONS[self.weight.kind]

    @property
    def num_splits(self) -> int:
        """Number of parts of the inputs that are summed separately, chosen to minimize the time of a decode."""
        weight, num_multiprocessors = self.weight, self.gpu.num_multiprocessors
        num_tiles = -(-weight.num_outputs // TILE_OUTPUTS)
        if num_tiles > num_multiprocessors:
            return 1  # the tiles alone occupy all multiprocessors
        most = min(_MAX_SPLITS, max(1, weight.num_inputs // _LEAST_INPUTS))

        def cost(num_splits: int) -> float:
            num_programs = num_tiles * num_splits
            waves = -(-num_programs // num_multiprocessors)
            is_alone = num_programs < _SHARING * num_multiprocessors
            return waves * (self._blocks_of(num_splits) + _END_BLOCKS) * (_ALONE_COST if is_alone else 1.0)

        best = min(range(1, most + 1), key=cost)
        return -(-weight.num_blocks // self._blocks_of(best))  # no split is empty

    @property
    def split_blocks(self) -> int:
        """Blocks of inputs of each split; the last one may have fewer."""
        return self._blocks_of(self.num_splits)

    def _blocks_of(self, num_splits: int) -> int:
        """Return the blocks of a split. They are a multiple of `_most_step`, so splits do not depend on the tile."""
        return -(-self.weight.num_blocks // (self._most_step * num_splits)) * self._most_step

    @property
    def _most_step(self) -> int:
        """Maximum number of blocks that an iteration multiplies; a divisor of `num_blocks`."""
        is_possible = self.weight.kind not in ("s8", "f8") and self.weight.num_blocks % 2 == 0
        return 2 if is_possible else 1

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Possible row counts of a tile for this weight, ascending."""
        # Other kinds need registers for float32 numbers or the scales of groups, and would spill in the largest tiles.
        is_large = self.weight.kind in ("u4", "s8") or (self.gpu.has_descriptors and not self._has_scaled_parts)
        return ROWS if is_large else ROWS[:-1]

    def num_warps(self, rows: int) -> int:
        """Return the number of warps of a program whose tile has this many rows."""
        return 8 if rows == ROWS[-1] or (self._has_scaled_parts and rows == self.row_sizes[-1]) else 4

    def step(self, rows: int) -> int:
        """Return the blocks of inputs that one iteration multiplies, for tiles with this many rows.

        Two blocks per iteration take fewer instructions for the loop, copies and addresses.
        """
        if rows > _MOST_ROWS_OF_STEPS or self.num_stages(rows, self._most_step) < _LEAST_STAGES_OF_STEPS:
            return 1
        return self._most_step

    def num_stages(self, rows: int, step: int) -> int:
        """Return the pipeline stages of a program, given the rows of its tile and the blocks of an iteration."""
        weight = self.weight
        row_bytes = 1 if weight.kind in ("s8", "f8") else 2
        block = weight.chunk * weight.num_chunks
        block_bytes = block * (rows * row_bytes) + weight.words[0, 0].numel() * weight.words.element_size()
        stage_bytes = step * block_bytes + 2048
        # Two programs share a multiprocessor, except with the largest tile. The epilogue needs memory for the results.
        most = self.gpu.shared_bytes // (1 if rows == ROWS[-1] else 2) - rows * TILE_OUTPUTS * 2 - 2048
        return max(2, min(6, most // stage_bytes))

    @property
    def _has_scaled_parts(self) -> bool:
        return self.weight.kind == "f8" and self.weight.group_size > 0

    def launch(self, num_rows: int) -> QuantizedLaunch:
        """Return the launch for a number of rows, at least one."""
        sizes, num_splits = self.row_sizes, self.num_splits
        rows = next((rows for rows in sizes if rows >= num_rows), sizes[-1])
        num_tiles = -(-num_rows // rows) * -(-self.weight.num_outputs // TILE_OUTPUTS)
        is_spread = num_splits > 1 and num_tiles <= self.gpu.num_multiprocessors
        step = self.step(rows)
        num_stages = self.num_stages(rows, step)
        return QuantizedLaunch(rows, num_tiles, num_splits, is_spread, self.num_warps(rows), step, num_stages)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See `octavo.kernels.linear.linear`."""
        weight, num_rows = self.weight, x_TI.shape[0]
        out_TO = torch.empty(num_rows, weight.num_outputs, dtype=x_TI.dtype, device=x_TI.device)
        if not out_TO.numel():
            return out_TO
        if weight.order_I is not None:
            x_TI = x_TI.index_select(1, weight.order_I)
        elif x_TI.stride(1) != 1:
            x_TI = x_TI.contiguous()
        row_scale_TG = weight.scales  # a placeholder that the kernel does not read
        if weight.kind in ("s8", "f8"):
            code_type = torch.int8 if weight.kind == "s8" else torch.float8_e4m3fn
            x_TI, row_scale_TG = quantize_rows(
                x_TI, code_type, group_size=weight.group_size, scale=weight.row_scale, scaling=weight.row_scaling
            )
        self._launch(x_TI, row_scale_TG, out_TO)
        return out_TO

    def _launch(self, x_TI: Tensor, row_scale_TG: Tensor, out_TO: Tensor) -> None:
        weight, launch = self.weight, self.launch(x_TI.shape[0])
        num_programs, sums = launch.num_tiles, weight.scales
        if launch.is_spread:
            num_programs *= launch.num_splits
            num_sums = num_programs * TILE_OUTPUTS * launch.rows
            sums_type = torch.int32 if weight.kind == "s8" else torch.float32
            sums = torch.empty(num_sums, dtype=sums_type, device=x_TI.device)
        quantized_linear_kernel[(num_programs,)](
            x_TI,
            row_scale_TG,
            weight.words,
            weight.scales,
            weight.scales if self.bias_O is None else self.bias_O,
            out_TO,
            sums,
            self.num_done,
            x_TI.shape[0],
            weight.num_outputs,
            weight.num_inputs,
            x_TI.stride(0),
            weight.num_blocks,
            self.split_blocks,
            row_scale_TG.shape[1],
            FORM=form_of(weight),
            NUM_SPLITS=launch.num_splits,
            IS_SPREAD=launch.is_spread,
            HAS_ROW_TILES=launch.rows == self.row_sizes[-1],
            HAS_BIAS=self.bias_O is not None,
            ROWS=launch.rows,
            STEP=launch.step,
            NUM_STAGES=launch.num_stages,
            num_warps=launch.num_warps,
            enable_fp_fusion=False,
            **launch_options(),
        )


def form_of(weight: GpuQuantizedWeight) -> Form:
    """Return the properties of a weight that kernels are specialized for."""
    return Form(
        kind=weight.kind,
        word_dtype=_TYPES[weight.words.dtype],
        scale_dtype=_TYPES[weight.scale_dtype],
        group=weight.group_size,
        other=weight.other,
        zero=weight.zero,
        unit=weight.unit,
        sum_unit=weight.sum_unit,
        chunk=weight.chunk,
        num_chunks=weight.num_chunks,
        is_even=weight.num_inputs % (weight.chunk * weight.num_chunks) == 0,
        assembly=None if triton.knobs.runtime.interpret else assembly(weight.kind, weight.dtype, weight.group_size),
        pieces=pieces_of(weight.kind, weight.dtype, weight.group_size),
        base=BASES.get((weight.kind, weight.dtype), 0),
    )


def has_float8(device: torch.device) -> bool:
    """Return whether a GPU multiplies matrices of float8_e4m3fn. True for other devices, where the kernel is only
    interpreted."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _FLOAT8_CAPABILITY


def has_kernels(device: torch.device) -> bool:
    """Return whether the kernel runs on a GPU. It does not on Blackwell for data centres, where Triton 3.6 compiles the
    largest tiles to an empty kernel."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != _MAJOR_WITHOUT_KERNELS
