"""The exchange format of quantized weights: one byte per level, independent of the packed layout.

One type holds every supported format: integer levels or float codes, with scales of groups, outputs, blocks or tensors.
Checkpoint readers create it, the packers of the devices consume it. Does not multiply. See docs/adr/0039.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from octavo.kernels.dispatch import require
from octavo.kernels.linear.codebooks import CODEBOOKS, Codebook, codebook, codebook_bits
from octavo.kernels.quantize.scaling import Scaling

GROUP_SIZES = (16, 32, 64, 128)
"""Numbers of inputs that share a scale, supported by the native kernels."""
GROUP_MULTIPLE = 16
SCALE_TYPES = (torch.float16, torch.bfloat16, torch.float32)

RowType = Literal["int8_token", "int8_tensor", "fp8_token", "fp8_tensor"]
"""How the checkpoint requires rows to be quantized: each with its own scale, or all with one static scale."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight whose value is `scale * (level - zero) + minimum` or `scale * codebook[level]`.

    Scale, zero and minimum are those of the level's group. The last group of an output is smaller if the number of
    inputs is not a multiple of the group size. A weight has at most one of `offset`, `zero_OG` and `minimum_OG`, except
    that an affine one may also have an offset. Readers give symmetric formats an offset (Q8_0, int8 with 128), affine
    ones a minimum (Q4_K) or integer zero points (GPTQ, AWQ). One scale per output is one group of all inputs. One scale
    per tensor is repeated for each output, and one per 128 x 128 block for each output of the block.

    Raises:
        ShapeError: dtypes or shapes do not match.
    """

    levels_OI: Tensor
    """uint8, one level or code per element."""
    scale_OG: Tensor
    """float16, bfloat16 or float32."""
    minimum_OG: Tensor | None
    """In the dtype of the scales; zero if `None`."""
    offset: int
    """The level that means zero, for all groups."""
    bits: int
    """4 when every level is below 16, otherwise 8."""
    group_size: int
    """A multiple of 16, or the number of inputs if there is only one group."""
    zero_OG: Tensor | None = None
    """uint8, the level that means zero in each group; `offset` if `None`."""
    codebook: Codebook | None = None
    """Codebook of the levels; `None` if levels are integers."""
    order_I: Tensor | None = None
    """int64; column `i` multiplies input `order_I[i]`, because columns are sorted by group (GPTQ's act-order). `None`
    if columns are in the order of the inputs."""
    row_type: RowType | None = None
    """How the checkpoint requires rows to be quantized; `None` if they are not (weight-only)."""
    row_scale: float | None = None
    """Static scale of all rows, if `row_type` has one."""
    row_scaling: Scaling = "range"
    """How integer rows are quantized."""
    used_levels: tuple[int, ...] | None = None
    """At most 16 levels, ascending, with `bits` 8: no others occur, so 4-bit indices can replace levels. `None` if any
    may."""

    def __post_init__(self) -> None:
        require(self.bits in (4, 8), f"quantized weight: {self.bits} bits")
        require(0 <= self.offset < 2**self.bits, f"quantized weight: offset {self.offset}")
        require(
            self.levels_OI.ndim == 2 and self.levels_OI.dtype == torch.uint8,
            f"quantized weight: levels of shape {tuple(self.levels_OI.shape)}, {self.levels_OI.dtype}",
        )
        num_outputs, num_inputs = self.levels_OI.shape
        require(
            self.group_size == num_inputs or (self.group_size > 0 and self.group_size % GROUP_MULTIPLE == 0),
            f"quantized weight: groups of {self.group_size}",
        )
        require(self.scale_OG.dtype in SCALE_TYPES, f"quantized weight: scales of type {self.scale_OG.dtype}")
        groups = (num_outputs, -(-num_inputs // self.group_size))
        for name, values, dtype in (
            ("scales", self.scale_OG, self.scale_OG.dtype),
            ("minimums", self.minimum_OG, self.scale_OG.dtype),
            ("zeros", self.zero_OG, torch.uint8),
        ):
            require(
                values is None or (values.shape == groups and values.dtype == dtype),
                f"quantized weight: {name} of type {getattr(values, 'dtype', None)} and shape "
                f"{tuple(getattr(values, 'shape', ()))}; expected {dtype} and {groups}",
            )
        require(
            self.row_scale is None or (math.isfinite(self.row_scale) and self.row_scale > 0),
            f"quantized weight: a scale of rows of {self.row_scale}",
        )
        require(
            self.zero_OG is None or (self.minimum_OG is None and not self.offset),
            "quantized weight: zeros of groups besides minimums or an offset",
        )
        require(
            self.codebook is None or (self.codebook in CODEBOOKS and codebook_bits(self.codebook) == self.bits),
            f"quantized weight: the codebook {self.codebook} with {self.bits} bits",
        )
        require(
            self.codebook is None or (self.minimum_OG is None and self.zero_OG is None and not self.offset),
            "quantized weight: float codes with minimums or zeros",
        )
        require(
            self.used_levels is None or (len(self.used_levels) <= 16 and (self.bits, self.codebook) == (8, None)),
            "quantized weight: more than 16 used levels, or some of codes or of 4 bits",
        )
        require(
            self.order_I is None or (self.order_I.shape == (num_inputs,) and self.order_I.dtype == torch.int64),
            f"quantized weight: an order that is not int64 of shape ({num_inputs},)",
        )
        require(
            self.order_I is None or is_permutation(self.order_I),
            "quantized weight: an order that does not have each input once",
        )

    @property
    def num_inputs(self) -> int:
        """Number of columns."""
        return self.levels_OI.shape[1]

    @property
    def num_outputs(self) -> int:
        """Number of rows."""
        return self.levels_OI.shape[0]

    @property
    def is_per_channel(self) -> bool:
        """Whether each output has one scale."""
        return self.scale_OG.shape[1] == 1

    @property
    def row_form(self) -> tuple[RowType | None, float | None, Scaling]:
        """How rows are quantized before they are multiplied with the weight."""
        return self.row_type, self.row_scale, self.row_scaling

    @property
    def description(self) -> str:
        """What the weight holds, for logs."""
        levels = self.codebook or f"{self.bits}-bit integers"
        scales = "a scale per output" if self.is_per_channel else f"groups of {self.group_size}"
        zeros = (
            " and zero points" if self.zero_OG is not None else " and minimums" if self.minimum_OG is not None else ""
        )
        return f"{levels} with {scales}{zeros}{'' if self.order_I is None else ', sorted by group (act-order)'}"

    def dequantize(self) -> Tensor:
        """Return the dequantized values, float32, shape OI, in the order of the inputs."""
        if self.codebook is not None:
            values_OI = codebook(self.codebook)[self.levels_OI.int()]
        elif self.zero_OG is not None:
            values_OI = (self.levels_OI.to(torch.int16) - self._of_elements(self.zero_OG)).float()
        else:
            values_OI = (self.levels_OI.to(torch.int16) - self.offset).float()
        values_OI *= self._of_elements(self.scale_OG.float())
        if self.minimum_OG is not None:
            values_OI += self._of_elements(self.minimum_OG.float())
        return (
            values_OI if self.order_I is None else torch.empty_like(values_OI).index_copy_(1, self.order_I, values_OI)
        )

    def rows(self, index: Tensor) -> Self:
        """Return the weight with only the outputs `index`, in that order."""
        return replace(
            self,
            levels_OI=self.levels_OI[index],
            scale_OG=self.scale_OG[index],
            minimum_OG=None if self.minimum_OG is None else self.minimum_OG[index],
            zero_OG=None if self.zero_OG is None else self.zero_OG[index],
        )

    def columns(self, inputs: range) -> Self:
        """Return the weight with only a range of inputs, without changing a value; groups become smaller if necessary.

        Raises:
            ShapeError: the range begins or ends at an input that is no multiple of 16, or columns are not in order.
        """
        require(self.order_I is None, "quantized weight: columns in an order of their own cannot be divided")
        group_size = self.group_size
        if self.is_per_channel:
            first = slice(0, 1)
            group_size = len(inputs)
        else:
            ends = [end for end in (inputs.start, inputs.stop) if end != self.num_inputs]
            group_size = math.gcd(group_size, *ends)
            require(
                group_size % GROUP_MULTIPLE == 0,
                f"quantized weight: inputs {inputs.start} to {inputs.stop} divide groups of {self.group_size}",
            )
            first = slice(inputs.start // group_size, -(-inputs.stop // group_size))
        whole = self if self.is_per_channel else self.with_groups(group_size)
        return replace(
            whole,
            levels_OI=self.levels_OI[:, inputs.start : inputs.stop],
            scale_OG=whole.scale_OG[:, first],
            minimum_OG=None if whole.minimum_OG is None else whole.minimum_OG[:, first],
            zero_OG=None if whole.zero_OG is None else whole.zero_OG[:, first],
            group_size=group_size,
        )

    def with_groups(self, group_size: int) -> Self:
        """Return the weight with its scales repeated for smaller groups.

        Args:
            group_size: a divisor of the weight's group size, or any size if each output has one scale.
        """
        if self.group_size == group_size:
            return self
        require(
            self.is_per_channel or self.group_size % group_size == 0,
            f"quantized weight: groups of {self.group_size} in groups of {group_size}",
        )
        num_groups = -(-self.num_inputs // group_size)

        def split(values_OG: Tensor | None) -> Tensor | None:
            if values_OG is None:
                return None
            if self.is_per_channel:
                return values_OG.expand(-1, num_groups)
            return values_OG.repeat_interleave(self.group_size // group_size, 1)[:, :num_groups]

        scale_OG = split(self.scale_OG)
        assert scale_OG is not None
        return replace(
            self,
            scale_OG=scale_OG,
            minimum_OG=split(self.minimum_OG),
            zero_OG=split(self.zero_OG),
            group_size=group_size,
        )

    def _of_elements(self, values_OG: Tensor) -> Tensor:
        if self.is_per_channel:
            return values_OG
        return values_OG.repeat_interleave(self.group_size, 1)[:, : self.num_inputs]


def fits_float16(values: Tensor) -> bool:
    """Return whether float16 rounds all values with an error of at most 2^-11: none is out of range, or subnormal and
    inexact."""
    halves = values.half()
    is_small = values.abs() < torch.finfo(torch.float16).smallest_normal
    return bool((halves.isfinite() & (~is_small | (halves == values))).all())


def is_permutation(order_I: Tensor) -> bool:
    """Return whether each index occurs in `order` exactly once."""
    return torch.equal(order_I.sort().values, torch.arange(len(order_I), dtype=order_I.dtype, device=order_I.device))


def have_one_form(parts: Sequence[QuantizedWeight]) -> bool:
    """Return whether `concatenate` accepts these parts.

    They must have the same codebook, column order and row quantization, groups that can be divided into common ones,
    and no zero points if some parts have minimums.
    """
    first = parts[0]
    return (
        all(
            part.num_inputs == first.num_inputs
            and (part.codebook, *part.row_form) == (first.codebook, *first.row_form)
            and _is_same_order(part.order_I, first.order_I)
            for part in parts
        )
        and not (_any_has(parts, "zero_OG") and _any_has(parts, "minimum_OG"))
        and _common_group_size(parts) is not None
    )


def concatenate(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Return one weight with the outputs of all parts, one below the other, without changing a value.

    Parts that differ are converted to a common form: the larger number of bits, the smaller group, and one offset. If
    all parts are symmetric and the levels still fit, the largest offset is used and levels are shifted up. With zero
    points in one part, all get zero points. Otherwise the offset is 0, and symmetric parts get the minimum
    `-offset * scale`, which is exact because their offsets are powers of two. (The new minimum of an affine part with
    an offset would be rounded; no format that we read has both.) Scales of two types become float32.

    Raises:
        ShapeError: there are no parts, or they have no common form.
    """
    require(bool(parts), "quantized weight: nothing to concatenate")
    require(len({part.num_inputs for part in parts}) == 1, "quantized weight: parts of different inputs")
    require(have_one_form(parts), "quantized weight: parts of different codebooks, orders, rows, groups or zeros")
    group_size = _common_group_size(parts)
    assert group_size is not None
    bits = max(part.bits for part in parts)
    dtype = parts[0].scale_OG.dtype
    dtype = dtype if all(part.scale_OG.dtype == dtype for part in parts) else torch.float32
    same_groups = [_with_scales_of(part.with_groups(group_size), dtype) for part in parts]
    same_form = _with_one_zero(same_groups, bits)
    is_affine = _any_has(same_form, "minimum_OG")
    zeros = [part.zero_OG for part in same_form if part.zero_OG is not None]
    have_same_levels = len({(part.used_levels, part.offset) for part in parts}) == 1 and not (is_affine or zeros)
    return replace(
        same_form[0],
        levels_OI=torch.cat([part.levels_OI for part in same_form]),
        scale_OG=torch.cat([part.scale_OG for part in same_form]),
        minimum_OG=torch.cat([_minimum_of(part) for part in same_form]) if is_affine else None,
        zero_OG=torch.cat(zeros) if zeros else None,
        bits=bits,
        used_levels=parts[0].used_levels if have_same_levels else None,
    )


def _any_has(parts: Sequence[QuantizedWeight], field: str) -> bool:
    return any(getattr(part, field) is not None for part in parts)


def _common_group_size(parts: Sequence[QuantizedWeight]) -> int | None:
    """Return the largest group size into which the groups of all parts can be divided; `None` if there is none."""
    sizes = {part.group_size for part in parts if not part.is_per_channel}
    if not sizes:
        return parts[0].group_size if len({part.group_size for part in parts}) == 1 else parts[0].num_inputs
    size = math.gcd(*sizes)
    return size if size % GROUP_MULTIPLE == 0 else None


def _is_same_order(first_I: Tensor | None, second_I: Tensor | None) -> bool:
    if first_I is None or second_I is None:
        return first_I is second_I
    return torch.equal(first_I, second_I)


def _with_scales_of(part: QuantizedWeight, dtype: torch.dtype) -> QuantizedWeight:
    minimum_OG = None if part.minimum_OG is None else part.minimum_OG.to(dtype)
    return replace(part, scale_OG=part.scale_OG.to(dtype), minimum_OG=minimum_OG)


def _with_one_zero(parts: list[QuantizedWeight], bits: int) -> list[QuantizedWeight]:
    if _any_has(parts, "zero_OG"):
        return [replace(part, zero_OG=_zeros_of(part), offset=0, bits=bits) for part in parts]
    largest = max(part.offset for part in parts)
    if all(part.offset == largest for part in parts):
        return [replace(part, bits=bits) for part in parts]
    is_symmetric = all(part.minimum_OG is None for part in parts)
    if is_symmetric and all(2**part.bits + largest - part.offset <= 2**bits for part in parts):
        return [
            replace(part, levels_OI=part.levels_OI + (largest - part.offset), offset=largest, bits=bits)
            for part in parts
        ]
    return [
        replace(part, minimum_OG=_minimum_of(part) - part.offset * part.scale_OG, offset=0, bits=bits)
        if part.offset
        else replace(part, bits=bits)
        for part in parts
    ]


def _zeros_of(part: QuantizedWeight) -> Tensor:
    if part.zero_OG is not None:
        return part.zero_OG
    return torch.full(part.scale_OG.shape, part.offset, dtype=torch.uint8)


def _minimum_of(part: QuantizedWeight) -> Tensor:
    return torch.zeros_like(part.scale_OG) if part.minimum_OG is None else part.minimum_OG
