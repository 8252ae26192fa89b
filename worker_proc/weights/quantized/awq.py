"""AWQ (Lin et al. 2023) as AutoAWQ's "gemm" version writes it: eight 4-bit integers of a word, along the outputs.

qweight  int32 (inputs, outputs / 8), of which the outputs of a word lie in the order 0 2 4 6 1 3 5 7
qzeros   int32 (groups, outputs / 8), in the same order
scales   float16 (groups, outputs)

value = scale * (level - zero)
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.linear.quantized import QuantizedWeight
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional, reject_unless
from octavo.worker_proc.weights.quantized.gptq import Settings
from octavo.worker_proc.weights.quantized.layer_rules import HEAD, is_listed
from octavo.worker_proc.weights.quantized.layout import Layout
from octavo.worker_proc.weights.quantized.matrix import StoredMatrix, require, unpack, zero_of_groups
from octavo.worker_proc.weights.quantized.tuning import AUTO_ROUND

_HARMLESS = """
quant_method zero_point do_fuse fuse_max_seq_len modules_to_fuse exllama_config lm_head meta
"""
"""Settings of the quantizer, or settings that the tensors repeat: symmetric weights have zero points of 8."""
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position of each output in its word."""


class Awq:
    """See `octavo.worker_proc.weights.quantized.assembly.Format`."""

    markers: tuple[str, ...] = ("qweight",)
    parts: tuple[str, ...] = ("qweight", "qzeros", "scales")

    def __init__(self, config: Mapping[str, Any]) -> None:
        config = CheckedConfig(config, "quantization_config")
        ignore(config, *_HARMLESS.split(), *AUTO_ROUND)
        reject_unless(config, "data_type", ("int", None))
        self._skipped: list[str] = optional(config, "modules_to_not_convert", [])
        bits = optional(config, "bits", optional(config, "w_bit", 4))
        if bits != 4:
            raise ConfigError(f"config.json: 'bits' in 'quantization_config' is {bits}; AWQ has 4 only")
        # GPTQModel writes `version` under two more names.
        for key in ("version", "format", "checkpoint_format"):
            version = str(config.get(key) or "gemm").lower()
            if version != "gemm":
                raise ConfigError(
                    f"config.json: {key!r} in 'quantization_config' is {version!r}; only 'gemm' is supported",
                    hint="use a checkpoint of the version gemm, which nearly all are",
                )
        reject_unless(config, "backend", ("autoawq", None))  # "llm-awq" packs words of 16 bits
        reject_unless(config, "method", ("awq", None))
        reject_unless(config, "pack_dtype", ("int32", None))
        reject_unless(config, "desc_act", (False, None))
        size = optional(config, "group_size", optional(config, "q_group_size", 128))
        self._group_size = Settings.of({"bits": bits, "group_size": size}).group_size
        config.reject_unread("awq")

    def layout(self, layer: str) -> Layout | None:
        """Return the memory layout of a layer."""
        if is_listed(layer, [HEAD, *self._skipped]):
            return None
        return Layout(4, None if self._group_size == -1 else self._group_size, has_zeros=True)

    def matrix(self, layer: str, tensors: Mapping[str, Tensor]) -> StoredMatrix:
        """Return the matrix of a layer."""
        return integer_matrix(layer, tensors, self._group_size)


def integer_matrix(layer: str, tensors: Mapping[str, Tensor], group_size: int) -> StoredMatrix:
    """Return the matrix of a layer.

    Args:
        layer: name of the layer.
        tensors: tensors by part.
        group_size: inputs that share a scale; -1: all.

    Raises:
        ConfigError: a tensor is missing, or is not a matrix.
    """
    qweight, qzeros, scales = (require(tensors, layer, part, num_dims=2) for part in Awq.parts)
    num_inputs, num_outputs = qweight.shape[0], qweight.shape[1] * 8

    def decode() -> QuantizedWeight:
        offset, zero_OG = zero_of_groups(_outputs(qzeros), 4)
        return QuantizedWeight(
            levels_OI=_outputs(qweight),
            scale_OG=scales.t().contiguous(),
            minimum_OG=None,
            offset=offset,
            bits=4,
            group_size=num_inputs if group_size == -1 else group_size,
            zero_OG=zero_OG,
        )

    return StoredMatrix(layer, (num_outputs, num_inputs), decode)


def _outputs(words_NW: Tensor) -> Tensor:
    """Return the integers of all outputs, shape (outputs, N)."""
    places = torch.tensor(_PLACES)
    levels_NO = unpack(words_NW, 4).view(len(words_NW), -1, 8)[:, :, places].flatten(1)
    return levels_NO.t().contiguous()
