"""Our own product on a GPU: a row has the same bits in any batch. Launches the kernels of `gpu_kernels`."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.dispatch import require
from octavo.kernels.linear.gpu_kernels import add_groups_kernel, linear_kernel, split_linear_kernel
from octavo.kernels.linear.gpu_tiles import H100, Gpu, Launch, Tile, Tiling, most_segments
from octavo.kernels.programmatic_launch import launch_options

_MAJOR_WITH_DESCRIPTORS = (9, 10)
"""Compute capabilities whose kernels use TMA descriptors: Hopper, and Blackwell for data centres. Desktop Blackwell has
the TMA too, but no tensor cores that read shared memory, so Triton would keep only one stage there."""
GROUPED_ROWS = 1024
"""Rows whose group sums are stored at once: the L2 cache holds most of them."""
_ADD_BLOCK = 1024


def gpu_of(device: torch.device) -> Gpu:
    """Return the properties of a GPU. Tensors that are not on one get those of an H100: no kernel runs compiled
    then."""
    if device.type != "cuda":
        return H100
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    has_descriptors = torch.cuda.get_device_capability(device)[0] in _MAJOR_WITH_DESCRIPTORS
    return Gpu(properties["multiprocessor_count"], properties["max_shared_mem"], has_descriptors)


@dataclass(frozen=True, slots=True, eq=False)
class InvariantLinear:
    """A weight that our kernels multiply."""

    weight_OI: Tensor
    """Contiguous weight."""
    bias_O: Tensor | None
    tiling: Tiling
    num_done: Tensor
    """Counters of finished splits per tile; int32, zero between calls."""
    is_partial: bool = False
    """Whether the results are partial sums, to be added to those of other ranks: float32, whatever the dtype of the
    rows."""

    @classmethod
    def new(cls, weight_OI: Tensor, bias_O: Tensor | None, gpu: Gpu, usual_outputs: int = 0) -> "InvariantLinear":
        """Make the product with a contiguous weight; for `usual_outputs` see `Tiling`."""
        num_outputs, num_inputs = weight_OI.shape
        tiling = Tiling(num_outputs, num_inputs, weight_OI.element_size(), gpu, usual_outputs=usual_outputs)
        # A launch with more tiles than multiprocessors computes all splits of a tile in one program.
        num_done = torch.zeros(gpu.num_multiprocessors, dtype=torch.int32, device=weight_OI.device)
        return cls(weight_OI, bias_O, tiling, num_done)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """See `octavo.kernels.linear.linear`."""
        return self._product(x_TI, is_gated=False)

    def silu_and_mul(self, x_TI: Tensor) -> Tensor:
        """See `octavo.kernels.linear.linear_silu_and_mul`."""
        return self._product(x_TI, is_gated=True)

    def _product(self, x_TI: Tensor, *, is_gated: bool) -> Tensor:
        num_rows, num_outputs = x_TI.shape[0], self.tiling.num_outputs
        width = num_outputs // 2 if is_gated else num_outputs
        dtype = torch.float32 if self.is_partial else x_TI.dtype
        out_TO = torch.empty(num_rows, width, dtype=dtype, device=x_TI.device)
        if out_TO.numel():
            launch = self.tiling.launch(num_rows, is_gated=is_gated)
            if launch.num_groups > 1:
                self._launch_groups(x_TI, out_TO)
            else:
                self._launch(x_TI, out_TO, launch, is_gated=is_gated)
        return out_TO

    def _launch_groups(self, x_TI: Tensor, out_TO: Tensor) -> None:
        """Store the sums of all groups of segments, and add them."""
        for x_SI, out_SO in zip(x_TI.split(GROUPED_ROWS), out_TO.split(GROUPED_ROWS), strict=True):
            launch = self.tiling.launch(len(x_SI))
            if launch.num_groups == 1:  # the last rows, if there are few
                self._launch(x_SI, out_SO, launch, is_gated=False)
                continue
            sums = torch.empty(launch.num_groups, *out_SO.shape, dtype=torch.float32, device=x_TI.device)
            self._launch(x_SI, sums, launch, is_gated=False)
            num_sums = out_SO.numel()
            add_groups_kernel[(triton.cdiv(num_sums, _ADD_BLOCK),)](
                sums, self.bias_O, out_SO, num_sums, out_SO.shape[1], NUM_GROUPS=launch.num_groups, BLOCK=_ADD_BLOCK
            )

    def _launch(self, x_TI: Tensor, out: Tensor, launch: Launch, *, is_gated: bool) -> None:
        """Launch the product. `out`: TO, or GTO for the sums of groups, which have no bias."""
        tiling, tile = self.tiling, launch.tile
        has_bias = self.bias_O is not None and launch.num_groups == 1
        has_descriptors = tiling.gpu.has_descriptors and tiling.element_bytes == 2 and _can_describe(self.weight_OI)
        if x_TI.stride(1) != 1 or (has_descriptors and not _can_describe(x_TI)):
            x_TI = x_TI.contiguous()
        x: Any = x_TI
        weight: Any = self.weight_OI
        if has_descriptors:
            x = TensorDescriptor.from_tensor(x_TI, [tile.rows, tile.inputs])
            # A tile of a gated product has columns of the gate, and the same columns of the other half.
            weight = (
                TensorDescriptor.from_tensor(self.weight_OI.unflatten(0, (2, -1)), [2, tile.outputs // 2, tile.inputs])
                if is_gated
                else TensorDescriptor.from_tensor(self.weight_OI, [tile.outputs, tile.inputs])
            )
        matrices = (x, weight, self.weight_OI, self.bias_O if has_bias else self.weight_OI, out)
        numbers = (*out.shape[-2:], tiling.num_inputs, x_TI.stride(0), tiling.split_inputs)
        options = {
            "NUM_SPLITS": tiling.num_splits // launch.num_groups,
            "HAS_BIAS": has_bias,
            "IS_GATED": is_gated,
            "HAS_DESCRIPTORS": has_descriptors,
            "IS_EVEN": tiling.num_inputs % tile.inputs == 0,
            **_options(tile),
            **launch_options(),
        }
        grid = (launch.num_programs,)
        if launch.is_spread:
            num_sums = launch.num_tiles * tiling.num_splits * tile.rows * tile.outputs
            sums = torch.empty(num_sums, dtype=torch.float32, device=x_TI.device)
            is_tree_sum = tiling.num_segments > 0
            split_linear_kernel[grid](*matrices, sums, self.num_done, *numbers, IS_TREE_SUM=is_tree_sum, **options)
        else:
            linear_kernel[grid](*matrices, *numbers, NUM_GROUPS=launch.num_groups, **options)


class TpInvariantLinear(InvariantLinear):
    """A weight whose products have the same bits on any number of ranks."""

    __slots__ = ()

    def in_segments(self, num_segments: int, num_ranks: int) -> "TpInvariantLinear":
        """See `octavo.kernels.linear.PackedLinear.in_segments`. The sums of several ranks are float32.

        Raises:
            ShapeError: the segments cannot be divided between the ranks.
        """
        num_inputs = self.tiling.num_inputs * num_ranks
        num_segments = most_segments(num_inputs, num_segments)
        require(
            num_segments % num_ranks == 0,
            f"{num_inputs} inputs can be added up in {num_segments} segments, too few for {num_ranks} ranks",
        )
        tiling = replace(self.tiling, num_segments=num_segments // num_ranks)
        return replace(self, tiling=tiling, is_partial=num_ranks > 1)


def _options(tile: Tile) -> dict[str, int]:
    return {
        "ROWS": tile.rows,
        "OUTPUTS": tile.outputs,
        "INPUTS": tile.inputs,
        "STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _can_describe(matrix: Tensor) -> bool:
    """Return whether the TMA can copy from a matrix with contiguous rows: the row stride is a multiple of 16 bytes."""
    stride = matrix.stride(0)
    return stride >= matrix.shape[1] and matrix.data_ptr() % 16 == 0 and stride * matrix.element_size() % 16 == 0
