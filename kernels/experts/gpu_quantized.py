"""Products of experts with quantized weights on a GPU: launches the kernels of `gpu_quantized_kernels`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from octavo.kernels.dispatch import require
from octavo.kernels.experts.gpu_quantized_kernels import quantized_down_kernel, quantized_gate_up_kernel
from octavo.kernels.linear import PackedLinear
from octavo.kernels.linear.gpu_quantized import QuantizedProduct, form_of
from octavo.kernels.linear.gpu_quantized_kernels import Form
from octavo.kernels.linear.gpu_quantized_layout import TILE_OUTPUTS
from octavo.kernels.linear.gpu_quantized_rows import quantize_rows

GATED_ROWS = 64
"""Maximum rows of a tile of gates and ups; the sums of two weights leave no registers for more."""


class Table(NamedTuple):
    """Addresses of the weights of each expert; int64."""

    words: Tensor
    scales: Tensor
    biases: Tensor
    """Zeros if there are none."""


class Tiles(NamedTuple):
    """The tiles of a step; see `octavo.kernels.experts.gpu.Lists`."""

    lists: tuple[Tensor, ...]
    most: int
    """Maximum number of tiles of positions."""
    rows: int
    """Positions in a tile."""


Deltas = tuple[Tensor | None, Tensor | None]
"""The adapters' outputs for gates and ups, by slot, and the adapter of each slot, -1 for none; or `None` twice. With
adapters, rows of the activation are ordered by slot, not by position."""


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """The gates, ups or downs of a layer's experts, all of one form."""

    first: QuantizedProduct
    table: Table
    form: Form

    @classmethod
    def of(cls, weights: Sequence[PackedLinear]) -> "QuantizedWeights | None":
        """Collect the weights of the experts; `None` if they are not quantized. Copies to the device.

        Raises:
            ShapeError: the experts of the layer have weights of different forms.
        """
        products = [weight.product for weight in weights if isinstance(weight.product, QuantizedProduct)]
        if not products:
            return None
        forms = {form_of(product.weight) for product in products}
        require(
            len(products) == len(weights) and len(forms) == 1,
            "experts: the quantized weights of a layer's experts have different forms, with which GPUs do not multiply "
            "together; --quantization none dequantizes them",
        )
        rows = [
            [product.weight.words.data_ptr() for product in products],
            [product.weight.scales.data_ptr() for product in products],
            [0 if product.bias_O is None else product.bias_O.data_ptr() for product in products],
        ]
        device = products[0].weight.words.device
        return cls(products[0], Table(*torch.tensor(rows, dtype=torch.int64, device=device).unbind(0)), forms.pop())

    @property
    def row_group(self) -> int | None:
        """Inputs of an 8-bit row that share a scale, 0 for all inputs; `None` if rows are not quantized."""
        return self.form.group if self.form.kind in ("s8", "f8") else None

    def rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows in the form that the kernels read, and their scales (a placeholder if rows have none).

        Each row has its own scale: a static scale of a checkpoint belongs to one expert, and experts share rows.
        """
        if self.row_group is None:
            return x, self.first.weight.scales
        code_type = torch.int8 if self.form.kind == "s8" else torch.float8_e4m3fn
        return quantize_rows(x, code_type, group_size=self.row_group, scaling=self.first.weight.row_scaling)


def tile_rows(
    gates: QuantizedWeights | None,
    others: Sequence[QuantizedWeights],
    sizes: Sequence[int],
    num_slots: int,
    num_own: int,
) -> int:
    """Return the rows of a tile, one of `sizes`: twice the average rows of an expert, because some experts have
    more."""
    weights = [*others] if gates is None else [gates, *others]
    usable = [rows for rows in sizes if all(rows in each.first.row_sizes for each in weights)]
    if gates is not None and (gates.form.kind == "s8" or not gates.first.gpu.has_descriptors):
        usable = [rows for rows in usable if rows <= GATED_ROWS]
    return next((rows for rows in usable if rows * num_own >= 2 * num_slots), usable[-1])


def multiply_gates_and_ups(
    x_TD: Tensor,
    gates: QuantizedWeights | None,
    ups: QuantizedWeights,
    tiles: Tiles,
    deltas: Deltas,
    top_k: int,
    out_PI: Tensor,
    *,
    is_clamped: bool,
) -> None:
    """Compute the activation, one row per position; `gates` is `None` if there are none.

    Raises:
        ShapeError: gates and ups need rows in different forms.
    """
    require(
        gates is None or gates.row_group == ups.row_group,
        "experts: gates and ups of a layer need rows of different forms; --quantization none dequantizes them",
    )
    weight = ups.first.weight
    x, row_scale = ups.rows(x_TD)
    of_gates = ups if gates is None else gates
    is_wide = gates is not None and tiles.rows == GATED_ROWS and not ups.first.gpu.has_descriptors
    firsts = ups.first, of_gates.first
    step = min(each.step(tiles.rows) for each in firsts)
    num_stages = min(each.num_stages(tiles.rows, step) for each in firsts)
    quantized_gate_up_kernel[(tiles.most * triton.cdiv(weight.num_outputs, TILE_OUTPUTS),)](
        x,
        row_scale,
        of_gates.table,
        ups.table,
        out_PI,
        tiles.lists,
        *deltas,
        weight.num_outputs,
        weight.num_inputs,
        of_gates.first.weight.num_blocks,
        weight.num_blocks,
        row_scale.shape[1],
        TOP_K=top_k,
        GATE=None if gates is None else gates.form,
        UP=ups.form,
        HAS_BIAS=ups.first.bias_O is not None,
        IS_CLAMPED=is_clamped,
        ROWS=tiles.rows,
        STEP=step,
        NUM_STAGES=num_stages,
        num_warps=8 if is_wide else ups.first.num_warps(tiles.rows),
        enable_fp_fusion=False,
    )


def multiply_downs(x_PI: Tensor, downs: QuantizedWeights, tiles: Tiles, output_SD: Tensor, *, by_slot: bool) -> None:
    """Compute the outputs of experts from rows by position, or by slot."""
    weight, step = downs.first.weight, downs.first.step(tiles.rows)
    x, row_scale = downs.rows(x_PI)
    quantized_down_kernel[(tiles.most * triton.cdiv(weight.num_outputs, TILE_OUTPUTS),)](
        x,
        row_scale,
        downs.table,
        output_SD,
        tiles.lists,
        weight.num_outputs,
        weight.num_inputs,
        weight.num_blocks,
        row_scale.shape[1],
        BY_SLOT=by_slot,
        FORM=downs.form,
        ROWS=tiles.rows,
        STEP=step,
        NUM_STAGES=downs.first.num_stages(tiles.rows, step),
        num_warps=downs.first.num_warps(tiles.rows),
        enable_fp_fusion=False,
    )
