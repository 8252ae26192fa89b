"""GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel write it: integers along the inputs, in words of 32 bits.

qweight  int32 (inputs * bits / 32, outputs)
qzeros   int32 (groups, outputs * bits / 32): the zero points, minus one where `checkpoint_format` is "gptq"
scales   float16 or bfloat16 (groups, outputs)
g_idx    int32 (inputs,): the group of each input

value = scale * (level - zero)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from octavo.kernels.linear.quantized import QuantizedWeight
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional, reject_unless, required
from octavo.worker_proc.weights.quantized.layer_rules import HEAD, expression, first_match
from octavo.worker_proc.weights.quantized.layout import Layout
from octavo.worker_proc.weights.quantized.matrix import StoredMatrix, require, sorted_by_group, unpack, zero_of_groups
from octavo.worker_proc.weights.quantized.tuning import AUTO_ROUND

_HARMLESS = """
quant_method sym true_sequential damp_percent damp_auto_increment static_groups tokenizer model_seqlen
module_name_preceding_first_block pad_token_id cache_block_outputs
modules_in_block_to_quantize model_name_or_path model_file_base_name quantizer meta exllama_config use_exllama
disable_exllama use_cuda_fp16 max_input_length backend pack_dtype version lm_head desc_act mse act_group_aware
is_marlin_format inner_batch_size
"""
"""Settings of the quantizer, or settings that the tensors repeat; symmetric weights have equal zero points."""
_FORMATS = ("gptq", "gptq_v2", None)
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""Word of ones, by bits. 3-bit integers span words."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How integers are stored."""

    bits: int
    """2, 3, 4 or 8."""
    group_size: int
    """Number of inputs that share a scale; -1: all."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Settings":
        """Return the settings in a section of config.json.

        Raises:
            ConfigError: a setting is missing or not supported.
        """
        bits, group_size = required(config, "bits", int), required(config, "group_size", int)
        where = "in 'quantization_config' is"
        if bits not in (2, 3, 4, 8):
            raise ConfigError(f"config.json: 'bits' {where} {bits}; only 2, 3, 4 and 8 are supported")
        if group_size != -1 and (group_size <= 0 or group_size % 16):
            raise ConfigError(
                f"config.json: 'group_size' {where} {group_size}; only -1 and multiples of 16 are supported"
            )
        return cls(bits, group_size)


class Gptq:
    """See `octavo.worker_proc.weights.quantized.assembly.Format`."""

    markers: tuple[str, ...] = ("qweight",)
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        config = CheckedConfig(config, "quantization_config")
        ignore(config, *_HARMLESS.split(), *AUTO_ROUND)
        reject_unless(config, "data_type", ("int", None))
        self._is_symmetric = optional(config, "sym", True)
        self._quantizes_head = optional(config, "lm_head", False)
        # GPTQModel 7 has the same values under two names.
        reject_unless(config, "checkpoint_format", _FORMATS)
        reject_unless(config, "format", _FORMATS)
        reject_unless(config, "method", ("gptq", None))
        reject_unless(config, "pack_dtype", ("int32", None))
        self._settings = Settings.of(config)
        self._zero_bias = 0 if "gptq_v2" in (config.get("checkpoint_format"), config.get("format")) else 1
        if optional(config, "is_marlin_format", False):
            raise ConfigError("config.json: 'is_marlin_format' in 'quantization_config' is not supported")
        rules: dict[str, Any] = optional(config, "dynamic", {})
        self._dynamic = {
            pattern: None if pattern.startswith("-:") else _of_rule(self._settings, pattern, rule)
            for pattern, rule in rules.items()
        }
        config.reject_unread("gptq")

    def _settings_of(self, layer: str) -> Settings | None:
        """Return the settings of a layer, chosen as in GPTQModel; `None` if it is not quantized."""
        return first_match(self._dynamic, layer, _matches, self._settings)

    def layout(self, layer: str) -> Layout | None:
        """Return the memory layout of a layer."""
        settings = self._settings_of(layer)
        if settings is None or (layer == HEAD and not self._quantizes_head):
            return None
        group_size = None if settings.group_size == -1 else settings.group_size
        return Layout(8 if settings.bits == 8 else 4, group_size, has_zeros=not self._is_symmetric)

    def matrix(self, layer: str, tensors: Mapping[str, Tensor]) -> StoredMatrix:
        """Return the matrix of a layer."""
        if (settings := self._settings_of(layer)) is None:
            raise ConfigError(
                f"config.json: 'dynamic' in 'quantization_config' leaves out {layer!r}, which the checkpoint holds "
                "quantized"
            )
        return integer_matrix(layer, tensors, settings.bits, settings.group_size, self._zero_bias)


def _matches(pattern: str, layer: str) -> bool:
    return expression(pattern.removeprefix("+:").removeprefix("-:")).match(layer) is not None


def integer_matrix(
    layer: str, tensors: Mapping[str, Tensor], bits: int, group_size: int, zero_bias: int
) -> StoredMatrix:
    """Return the matrix of a layer.

    Args:
        layer: name of the layer.
        tensors: tensors by part.
        bits: 2, 3, 4 or 8.
        group_size: inputs that share a scale; -1: all.
        zero_bias: number to add to stored zero points, 0 or 1.

    Raises:
        ConfigError: a tensor is missing, or is not a matrix.
    """
    qweight, qzeros, scales = (require(tensors, layer, part, num_dims=2) for part in ("qweight", "qzeros", "scales"))
    num_inputs, num_outputs = qweight.shape[0] * 32 // bits, qweight.shape[1]
    group_size = num_inputs if group_size == -1 else group_size

    def decode() -> QuantizedWeight:
        levels_OI = unpack(qweight.t(), bits)
        order_I = sorted_by_group(tensors["g_idx"], group_size, layer) if "g_idx" in tensors else None
        offset, zero_OG = zero_of_groups(_zeros(qzeros, bits, zero_bias)[:, :num_outputs].t(), max(bits, 4))
        return QuantizedWeight(
            levels_OI=levels_OI if order_I is None else levels_OI[:, order_I],
            scale_OG=scales.t().contiguous(),
            minimum_OG=None,
            offset=offset,
            bits=8 if bits == 8 else 4,
            group_size=group_size,
            zero_OG=zero_OG,
            order_I=order_I,
        )

    return StoredMatrix(layer, (num_outputs, num_inputs), decode)


def _zeros(qzeros: Tensor, bits: int, bias: int) -> Tensor:
    """Return the zero points, uint8, shape (groups, outputs)."""
    if bias and bits in _ONES:
        # GPTQModel subtracts one from whole words, so a zero point of 0 borrows from the next one.
        return unpack(qzeros + _ONES[bits], bits)
    zeros: Tensor = (unpack(qzeros, bits) + bias) & (2**bits - 1)
    return zeros


def _of_rule(settings: Settings, pattern: str, rule: Any) -> Settings:
    """Return the settings of the layers that a rule of `dynamic` matches."""
    if not isinstance(rule, Mapping):
        raise ConfigError(
            f"config.json: {pattern!r} in 'dynamic' of 'quantization_config' is {rule!r}; expected an object"
        )
    if unknown := sorted(set(rule) - {"bits", "group_size", *_HARMLESS.split()}):
        raise ConfigError(f"config.json: {unknown[0]!r} of 'dynamic' in 'quantization_config' is not supported")
    return Settings.of({"bits": settings.bits, "group_size": settings.group_size, **rule})
