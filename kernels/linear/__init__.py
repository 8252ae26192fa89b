"""Matrix product with a weight. A row has the same bits in any batch. Does not shard weights.

There are two implementations for a CPU: through torch (`cpu.py`), and in C++ (`native.py`), which also takes quantized
weights. There are two for a GPU (`gpu.py`): cuBLAS, with row counts that a test at load shows to be batch-invariant,
and Triton kernels (`gpu_product.py`); a third one multiplies with quantized weights (`gpu_quantized.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.linear import cpu
from octavo.kernels.linear.native import NativeLinear, NativeProduct
from octavo.kernels.linear.packing import native_form, pack, pack_quantized
from octavo.kernels.linear.quantization import Quantization, quantize_weight
from octavo.kernels.linear.quantized import QuantizedWeight
from octavo.kernels.linear.record import record
from octavo.kernels.linear.stacked import StackedRows
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.silu_and_mul import silu_and_mul


class DevicePacker(Protocol):
    """Packs weights for one kind of device."""

    def pack(
        self, weight_OI: Tensor, bias_O: Tensor | None, *, is_grouped: bool = False, whole_outputs: int | None = None
    ) -> Callable[[Tensor], Tensor]:
        """Return the product with a weight: from TI to TO. See `Packer.pack`."""

    def pack_quantized(
        self, weight: QuantizedWeight, bias_O: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Callable[[Tensor], Tensor] | None:
        """Return the product of rows in `dtype` with a quantized weight; `None` if no kernel multiplies with its
        format."""


@runtime_checkable
class PaddingProduct(Protocol):
    """A product that pads some row counts."""

    def padded_rows(self, num_rows: int) -> int:
        """Return the row count that is computed for `num_rows` rows."""


@runtime_checkable
class SizedProduct(Protocol):
    """A product whose weight does not take the bytes of its elements in the rows' dtype."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight in memory."""

    @property
    def description(self) -> str:
        """Number format of the product, for the log."""


@runtime_checkable
class SegmentedProduct(Protocol):
    """A product that can sum its inputs in segments."""

    def in_segments(self, num_segments: int, num_ranks: int) -> Callable[[Tensor], Tensor]:
        """See `PackedLinear.in_segments`."""


@runtime_checkable
class GatedProduct(Protocol):
    """A product that can apply the gated activation to its results before it stores them."""

    def silu_and_mul(self, x_TI: Tensor) -> Tensor:
        """See `linear_silu_and_mul`."""


def new_packer(*, is_batch_invariant: bool, is_tp_invariant: bool = False) -> DevicePacker:
    """Return the packer for a CPU, on which every product is batch-invariant."""
    return cpu.Packer()


_PACKERS = {"cpu": new_packer, "cuda": lazy("octavo.kernels.linear.gpu", new_packer)}


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear:
    """A weight and a bias in the layout that is fastest on one kind of device; made once, when a model is loaded."""

    num_inputs: int
    num_outputs: int
    dtype: torch.dtype | None
    """Dtype of the rows; `None` if any float dtype, since the rows are quantized before the product."""
    device: torch.device
    product: Callable[[Tensor], Tensor]
    is_tp_invariant: bool = False
    """Whether products must have the same bits on any number of ranks."""

    def in_segments(self, num_segments: int, num_ranks: int) -> "PackedLinear":
        """Return the weight with its inputs summed in segments, whose sums are then added pairwise as in a binary tree.

        If ranks divide the inputs and add their sums in the same tree, the result does not depend on the number of
        ranks, up to the number of segments. Products of torch, and those of GPUs that are not tp-invariant, sum all
        inputs of a rank at once.

        Args:
            num_segments: segments of the inputs of all ranks: 1, 2, 4 or 8. Fewer are used if they would split words or
                groups.
            num_ranks: ranks that divide the inputs evenly.

        Raises:
            ShapeError: the product must be tp-invariant, and there are too few segments for the ranks.
        """
        if isinstance(self.product, SegmentedProduct):
            return replace(self, product=self.product.in_segments(num_segments, num_ranks))
        if not isinstance(self.product, NativeProduct):
            return self
        packed = self.product.packed
        if packed.has_row_scales:
            require(
                not self.is_tp_invariant or num_ranks == 1,
                f"rows are quantized with one scale for the inputs of a rank, which {num_ranks} ranks divide",
            )
            return self
        while num_segments > 1 and self.num_inputs * num_ranks % (num_segments * packed.segment_multiple):
            num_segments //= 2
        is_divided = num_segments % num_ranks == 0
        require(
            is_divided or not self.is_tp_invariant,
            f"{self.num_inputs * num_ranks} inputs can be added up in {num_segments} segments, too few for "
            f"{num_ranks} ranks",
        )
        own = num_segments // num_ranks if is_divided else 1
        return replace(self, product=replace(self.product, packed=replace(packed, num_segments=own)))

    def padded_rows(self, num_rows: int) -> int:
        """Return the row count that is computed for `num_rows` rows; padding costs a copy of the rows."""
        return self.product.padded_rows(num_rows) if isinstance(self.product, PaddingProduct) else num_rows


_HEAD_QUANTIZATION: dict[Quantization | None, Quantization] = {"w8a8": "int8", "int8": "int8", "int4": "int4"}
"""Format of the output weight. Float codes are only for the other weights, as in vLLM. With a single scale per output,
the output weight would cost about as much quality as all other weights together."""


class Packer:
    """Packs the weights of one model. Test results for one weight are reused for weights of the same shape.

    Args:
        device: device of the weights.
        native: the native library to multiply with; torch multiplies if `None`.
        quantization: applied to float weights; int8 and int4 need a native library.
        is_batch_invariant: if False, the fastest product of a GPU is used, whose bits depend on the number of rows. On
            a CPU all products are batch-invariant.
        is_tp_invariant: the bits must not depend on the number of ranks that divide a weight.
    """

    def __init__(
        self,
        device: torch.device,
        native: NativeLibrary | None = None,
        quantization: Quantization | None = None,
        *,
        is_batch_invariant: bool = True,
        is_tp_invariant: bool = False,
    ) -> None:
        self._device = device
        self._packer = choose("linear", _PACKERS, device)(
            is_batch_invariant=is_batch_invariant, is_tp_invariant=is_tp_invariant
        )
        self.is_tp_invariant = is_tp_invariant
        self._library = native
        self._quantization = quantization

    def pack(
        self,
        weight_OI: Tensor | StackedRows,
        bias_O: Tensor | None = None,
        *,
        quantizes: bool = True,
        is_head: bool = False,
        is_grouped: bool = False,
        whole_outputs: int | None = None,
    ) -> PackedLinear:
        """Return the packed form, which no longer needs the arguments.

        Args:
            weight_OI: any float dtype; `StackedRows` may be released by this call.
            bias_O: same dtype as the weight.
            quantizes: if True, the weight is packed in the packer's quantization, or with quantized values in the rows'
                dtype if no kernel multiplies with its codes. If False, it is not quantized.
            is_head: whether it is the output weight of a model.
            is_grouped: whether `experts` or `head_linear` multiplies it together with others, instead of `linear`.
            whole_outputs: number of outputs of all ranks that divide the outputs; `None` if they are not divided.

        Raises:
            ShapeError: the shapes or dtypes do not match.
        """
        require(len(weight_OI.shape) == 2, f"linear: a weight of shape {tuple(weight_OI.shape)}")
        require(
            bias_O is None or (bias_O.shape == weight_OI.shape[:1] and bias_O.dtype == weight_OI.dtype),
            "linear: the bias needs one value per output, of the weight's dtype",
        )
        quantization = _HEAD_QUANTIZATION.get(self._quantization) if is_head else self._quantization
        if quantization is not None and quantizes:
            quantized = quantize_weight(self._library, weight_OI, quantization)
            if isinstance(weight_OI, StackedRows):
                weight_OI.release()  # the packed form takes its memory
            packed = self.pack_quantized(quantized, bias_O, dtype=weight_OI.dtype, is_grouped=is_grouped)
            if packed is not None:
                return packed
            weight_OI = quantized.dequantize().to(weight_OI.dtype)
        if self._library is not None:
            return self.adopt(pack(self._library, weight_OI, bias_O))
        weight_OI = weight_OI.whole() if isinstance(weight_OI, StackedRows) else weight_OI
        num_outputs, num_inputs = weight_OI.shape
        product = self._packer.pack(weight_OI, bias_O, is_grouped=is_grouped, whole_outputs=whole_outputs)
        return PackedLinear(num_inputs, num_outputs, weight_OI.dtype, weight_OI.device, product)

    def pack_quantized(
        self,
        weight: QuantizedWeight,
        bias_O: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        is_grouped: bool = False,
    ) -> PackedLinear | None:
        """Return the packed form of a quantized weight; `None` if no kernel multiplies with its format here, so that
        the caller must dequantize it.

        Args:
            weight: on any device.
            bias_O: any float dtype.
            dtype: dtype of the rows; ignored by the native library.
            is_grouped: see `pack`.

        Raises:
            ShapeError: the bias does not have one value per output.
        """
        require(bias_O is None or bias_O.shape == (weight.num_outputs,), "linear: the bias needs one value per output")
        if (
            is_grouped and weight.row_type == "int8_tensor"
        ):  # a static scale belongs to one expert, and experts share rows
            weight = replace(weight, row_type="int8_token", row_scale=None)
        if self._library is not None:
            form = native_form(weight)
            if form is None or (is_grouped and form.order_I is not None):
                return None
            return self.adopt(pack_quantized(self._library, form, bias_O))
        if dtype is None or (is_grouped and weight.order_I is not None):
            return None
        product = self._packer.pack_quantized(weight, bias_O, dtype, self._device)
        if product is None:
            return None
        return PackedLinear(weight.num_inputs, weight.num_outputs, dtype, self._device, product)

    def adopt(self, packed: NativeLinear) -> PackedLinear:
        """Return a weight that was packed earlier by a library with the same layout."""
        assert self._library is not None, "packed by a native library and to be used without one"
        product = NativeProduct(self._library, packed)
        return PackedLinear(
            packed.num_inputs, packed.num_outputs, packed.dtype, self._device, product, self.is_tp_invariant
        )


def linear(x_TI: Tensor, packed: PackedLinear) -> Tensor:
    """Return `x @ weight.T + bias`, shape TO, in the dtype of `x`. A tp-invariant product with a part of the inputs
    returns float32, which the caller adds to those of the other ranks.

    Sums are accumulated in at least float32. With a quantized weight the rows are first quantized, in the weight's
    groups: see `octavo.kernels.linear.packing.native_form`.

    Raises:
        ShapeError: the rows do not fit the weight, or differ in dtype or device.
    """
    _require_fitting(x_TI, packed)
    if x_TI.device.type == "recorded":
        assert isinstance(packed.product, NativeProduct), "programs need weights that the library packed"
        return record(x_TI, packed.product)
    return packed.product(x_TI)


def linear_silu_and_mul(x_TI: Tensor, packed: PackedLinear) -> Tensor:
    """Return `octavo.kernels.silu_and_mul` of `linear(x, packed)`, with the bits of the two operations in sequence.

    Raises:
        ShapeError: the rows do not fit the weight, or the weight has an odd number of outputs.
    """
    if isinstance(packed.product, GatedProduct):
        _require_fitting(x_TI, packed)
        require(packed.num_outputs % 2 == 0, f"linear_silu_and_mul: {packed.num_outputs} outputs have no two halves")
        return packed.product.silu_and_mul(x_TI)
    return silu_and_mul(linear(x_TI, packed))


def _require_fitting(x_TI: Tensor, packed: PackedLinear) -> None:
    require(
        x_TI.ndim == 2
        and x_TI.shape[1] == packed.num_inputs
        and (x_TI.dtype == packed.dtype or packed.dtype is None)
        and (x_TI.device == packed.device or x_TI.device.type == "recorded"),
        f"linear: {tuple(x_TI.shape)} {x_TI.dtype} on {x_TI.device} with a weight of {packed.num_inputs} inputs, "
        f"{packed.dtype} on {packed.device}",
    )
