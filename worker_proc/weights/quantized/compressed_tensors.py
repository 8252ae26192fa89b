"""compressed-tensors, as llm-compressor writes it: groups of layers, each with a quantization scheme.

weight_packed      int32 (outputs, inputs * bits / 32), of integers plus 2 ** (bits - 1) (pack-quantized); or
                   uint8 (outputs, inputs / 2), of 4-bit floats (nvfp4- and mxfp4-pack-quantized)
weight             int8 or float8_e4m3fn (outputs, inputs) (int-, float-, naive- and mxfp8-quantized)
weight_scale       of the tensor, of outputs, of groups of inputs, or of blocks; uint8 are powers of two (e8m0)
weight_zero_point  int8, or packed along the outputs
weight_g_idx       int32 (inputs,), the group of each input
weight_global_scale, input_scale  one number each

value = scale * (level - zero)
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.linear.codebooks import Codebook
from octavo.kernels.linear.quantized import GROUP_MULTIPLE, QuantizedWeight, RowType
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional, reject_unless, required
from octavo.worker_proc.weights.quantized import compressed_stacks
from octavo.worker_proc.weights.quantized.float4 import float4_matrix, float_scale
from octavo.worker_proc.weights.quantized.fp8 import FLOAT8, float8_matrix, spread, static_scale
from octavo.worker_proc.weights.quantized.layer_rules import is_target
from octavo.worker_proc.weights.quantized.layout import Layout, block_of
from octavo.worker_proc.weights.quantized.matrix import (
    StoredMatrix,
    StoredStack,
    require,
    sorted_by_group,
    unpack,
    zero_of_groups,
)

logger = logging.getLogger(__name__)

_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
_SECTION = "quantization_config"
_STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
_UNUSED = ("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype")
"""Settings of the quantizer, and settings that the tensors repeat."""


@dataclass(frozen=True, slots=True)
class _Scheme:
    """How the layers of a group are quantized."""

    targets: Sequence[str]
    bits: int
    is_float: bool
    is_symmetric: bool
    group_size: int | None
    """`None` if the scales determine it."""
    block: tuple[int, int] | None
    rows: RowType | None


class CompressedTensors:
    """See `octavo.worker_proc.weights.quantized.assembly.Format`."""

    markers: tuple[str, ...] = ("weight_packed", "weight_scale")
    parts: tuple[str, ...] = (
        *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"),
        *("weight_global_scale", "input_scale", "input_zero_point", "input_global_scale"),
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        config = CheckedConfig(config, _SECTION)
        ignore(config, "quant_method", "global_compression_ratio", "quantization_status", "version")
        self._ignored: list[str] = optional(config, "ignore", [])
        ignore(config, "run_compressed", "moe_sparsity_config")  # from a model whose other experts were removed
        ignore(config, "kv_cache_scheme")  # protocol/config/weight_format.py
        _check_format(config)
        sparsity: dict[str, Any] = optional(config, "sparsity_config", {})
        if sparsity.get("format", "dense") != "dense":
            raise _refused("sparsity_config", f"a format {sparsity['format']!r}", "use a checkpoint that is not sparse")
        transforms: dict[str, Any] = optional(config, "transform_config", {})
        if transforms.get("config_groups"):
            raise _refused("transform_config", "rotations of activations", "use a checkpoint without them")
        schemes = [_scheme(name, group) for name, group in required(config, "config_groups", dict).items()]
        # Names first, then expressions in alphabetical order: the order in which compressed-tensors matches.
        pairs = [(target, scheme) for scheme in schemes for target in scheme.targets]
        self._schemes = sorted(pairs, key=lambda pair: (str(pair[0]).startswith("re:"), str(pair[0])))
        config.reject_unread("compressed-tensors")

    def _scheme_of(self, layer: str) -> _Scheme | None:
        """Return the scheme of a layer: of the first name or expression that matches it, or else of its class."""
        for matches in (is_target, _is_class):
            for target, scheme in self._schemes:
                if matches(layer, target):
                    return scheme
        return None

    def _scheme_of_quantized(self, layer: str) -> _Scheme:
        if (scheme := self._scheme_of(layer)) is None:
            raise ConfigError(
                f"the checkpoint holds {layer!r} quantized, but no group in 'config_groups' of config.json has it",
                hint="check that config.json belongs to the checkpoint",
            )
        return scheme

    def layout(self, layer: str) -> Layout | None:
        """Return the memory layout of a layer."""
        scheme = self._scheme_of(layer)
        if scheme is None or any(is_target(layer, pattern) for pattern in self._ignored):
            return None
        bits = 8 if scheme.bits > 4 else 4
        codes: Codebook | None = None if not scheme.is_float else "e4m3" if bits == 8 else "e2m1"
        group_size = scheme.group_size or (scheme.block[1] if scheme.block else None)
        return Layout(bits, group_size, codes, not scheme.is_symmetric, scheme.rows)

    def matrix(self, layer: str, tensors: Mapping[str, Tensor]) -> StoredMatrix:
        """Return the matrix of a layer."""
        return self._matrix(layer, tensors, self._scheme_of_quantized(layer))

    def places_in_stacks(self, names: Collection[str]) -> dict[str, tuple[str, str]]:
        """Return the stack and the part of each tensor of a quantized stack."""
        return compressed_stacks.places_in_stacks(names, self.parts)

    def stack(self, name: str, tensors: Mapping[str, Tensor]) -> StoredStack:
        """Return the matrices of all experts of a layer."""
        scheme = self._scheme_of_quantized(name)
        return compressed_stacks.stack_of(name, tensors, lambda layer, own: self._matrix(layer, own, scheme))

    def _matrix(self, layer: str, tensors: Mapping[str, Tensor], scheme: _Scheme) -> StoredMatrix:
        scale = require(tensors, layer, "weight_scale")
        row_scale = static_scale(tensors, layer) if scheme.rows in ("int8_tensor", "fp8_tensor") else None
        packed = tensors.get("weight_packed")
        if packed is not None and packed.dtype == torch.uint8 and scheme.is_float:
            return float4_matrix(layer, packed, scale, divisor=tensors.get("weight_global_scale"))
        if packed is None and require(tensors, layer, "weight").dtype == FLOAT8:
            scale = float_scale(scale)
            return float8_matrix(layer, tensors["weight"], scale, scheme.block, scheme.rows, row_scale)
        return _integer_matrix(layer, tensors, scheme, row_scale)


def _is_class(_: str, target: str) -> bool:
    return target in ("Linear", "LinearBase")


def _check_format(config: Mapping[str, Any]) -> None:
    reject_unless(config, "format", (*_FORMATS, None))


def _refused(key: str, what: str, hint: str) -> ConfigError:
    return ConfigError(f"config.json: {key!r} in {_SECTION!r} asks for {what}, which is not supported", hint=hint)


def _scheme(name: str, group: Any) -> _Scheme:
    """Return the scheme of a group of `config_groups`."""
    if not isinstance(group, Mapping):
        raise _refused("config_groups", f"a preset instead of a group ({group!r})", "use llm-compressor's own output")
    group = CheckedConfig(group, f"{name} of config_groups")
    _check_format(group)
    if group.get("output_activations") is not None:
        raise _refused("output_activations", "quantized outputs", "use a checkpoint without them")
    if group.get("weights") is None:
        what = f"activations of {group.get('targets')} without quantized weights (group {name!r})"
        raise _refused("config_groups", what, "use a checkpoint without this group")
    weights = CheckedConfig(required(group, "weights", dict), f"weights of {name}")
    ignore(weights, *_UNUSED, "dynamic")
    bits = optional(weights, "num_bits", 8)
    kind = optional(weights, "type", "int")
    if (
        kind not in ("int", "float")
        or (kind == "int" and not 2 <= bits <= 8)
        or (kind == "float" and bits not in (4, 8))
    ):
        raise _refused("weights", f"weights of type {kind!r} with {bits} bits", "use another checkpoint")
    reject_unless(weights, "strategy", (*_STRATEGIES, None))
    scheme = _Scheme(
        targets=required(group, "targets", list),
        bits=bits,
        is_float=kind == "float",
        is_symmetric=optional(weights, "symmetric", True),
        group_size=_group_size(weights) if optional(weights, "strategy", "").endswith("group") else None,
        block=block_of(weights, "block_structure"),
        rows=_rows(optional(group, "input_activations", {}), f"input_activations of {name}"),
    )
    weights.reject_unread("compressed-tensors")
    group.reject_unread("compressed-tensors")
    return scheme


def _group_size(weights: Mapping[str, Any]) -> int | None:
    """Return the number of inputs per scale; `None` if the scales determine it."""
    size = optional(weights, "group_size", -1)
    if size != -1 and (size < 1 or size % GROUP_MULTIPLE):
        what = f"groups of {size} inputs"
        raise _refused("weights", what, f"use a checkpoint whose 'group_size' is -1 or a multiple of {GROUP_MULTIPLE}")
    return None if size == -1 else size


def _rows(section: Mapping[str, Any], name: str) -> RowType | None:
    """Return how rows are quantized; `None` if the checkpoint does not say, or cannot be followed (then it is
    logged)."""
    if not section:
        return None
    activations = CheckedConfig(section, name)
    ignore(activations, *_UNUSED, "group_size", "block_structure")
    kind, bits = optional(activations, "type", "int"), optional(activations, "num_bits", 8)
    is_symmetric, is_dynamic = optional(activations, "symmetric", True), activations.get("dynamic") or False
    strategy = activations.get("strategy")
    reject_unless(activations, "dynamic", (True, False, "local", None))
    reject_unless(activations, "strategy", (*_STRATEGIES, "token", None))
    activations.reject_unread("compressed-tensors")
    if kind not in ("int", "float") or bits not in (4, 8):
        raise _refused("input_activations", f"activations of type {kind!r} with {bits} bits", "use another checkpoint")
    if bits == 4 or not is_symmetric:
        logger.warning(
            "the checkpoint asks for activations of %d bits%s, which octavo does not have: they keep the type "
            "of --dtype",
            *(bits, "" if is_symmetric else " with zero points"),
        )
        return None
    if not is_dynamic and strategy not in ("tensor", None):
        what = f"static activations with the strategy {strategy!r}"
        raise _refused("input_activations", what, "use a checkpoint with dynamic ones, or with the strategy 'tensor'")
    if kind == "int":
        return "int8_token" if is_dynamic else "int8_tensor"
    return "fp8_token" if is_dynamic else "fp8_tensor"


def _integer_matrix(
    layer: str, tensors: Mapping[str, Tensor], scheme: _Scheme, row_scale: float | None
) -> StoredMatrix:
    packed = tensors.get("weight_packed")
    stored = require(tensors, layer, "weight" if packed is None else "weight_packed", num_dims=2)
    if stored.dtype not in (torch.int8, torch.int32):
        raise ConfigError(f"the weight of {layer!r} is of type {stored.dtype}; expected int8, int32 or {FLOAT8}")
    num_outputs, num_inputs = stored.shape
    if packed is not None:
        num_inputs = int(require(tensors, layer, "weight_shape")[1])
        if packed.shape[1] != -(-num_inputs * scheme.bits // 32):
            raise ConfigError(
                f"{f'{layer}.weight_packed'!r} has {packed.shape[1]} words for {num_inputs} integers of {scheme.bits} "
                "bits: it was packed by an old release of compressed-tensors",
                hint="use a checkpoint with 4 or 8 bits, or compress it again",
            )

    def decode() -> QuantizedWeight:
        levels_OI = _unsigned(stored) if packed is None else _unpacked(stored, scheme.bits)[:, :num_inputs]
        scale_OG, group_size = spread(tensors["weight_scale"], (num_outputs, num_inputs), scheme.block)
        group_size = scheme.group_size or group_size
        order_I = sorted_by_group(tensors["weight_g_idx"], group_size, layer) if "weight_g_idx" in tensors else None
        bits = 4 if packed is not None and scheme.bits <= 4 else 8
        offset, zero_OG = 2 ** (scheme.bits - 1) if bits == 4 else 128, None
        if not scheme.is_symmetric:
            zeros = require(tensors, layer, "weight_zero_point")
            zeros = (
                _unpacked(zeros.t(), scheme.bits)[:, :num_outputs].t()
                if zeros.dtype == torch.int32
                else _unsigned(zeros)
            )
            offset, zero_OG = zero_of_groups(
                spread(zeros.to(torch.float32), (num_outputs, num_inputs), scheme.block)[0].to(torch.uint8), 8
            )
        return QuantizedWeight(
            levels_OI=levels_OI if order_I is None else levels_OI[:, order_I],
            scale_OG=scale_OG,
            minimum_OG=None,
            offset=offset,
            bits=bits,
            group_size=group_size,
            zero_OG=zero_OG,
            order_I=order_I,
            row_type=scheme.rows,
            row_scale=row_scale,
        )

    return StoredMatrix(layer, (num_outputs, num_inputs), decode)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Return packed integers as uint8, with those of 5, 6 and 7 bits around 128.

    The weight has 8 bits then, and `octavo.kernels.linear.packing` rounds zero points by their distance from 128.
    """
    levels = unpack(words, bits)
    return levels + (128 - 2 ** (bits - 1)) if 4 < bits < 8 else levels


def _unsigned(values: Tensor) -> Tensor:
    """Return int8 numbers plus 128, as uint8."""
    return values.contiguous().view(torch.uint8) ^ 128
