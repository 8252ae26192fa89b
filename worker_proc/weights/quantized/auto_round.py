"""AutoRound (Cheng et al. 2023) as Intel's tool writes it under its own name: the tensors of GPTQ or of AWQ.

packing_format          tensors
auto_round:auto_gptq    GPTQ's, zero points minus one
auto_round,
auto_round:gptqmodel    GPTQ's, zero points as they are
auto_round:auto_awq     AWQ's

Older releases have the name in `backend`, such as "auto_round:gptq:exllamav2". `extra_config` names layers with other
settings, by name or pattern.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional
from octavo.worker_proc.weights.quantized import awq, gptq
from octavo.worker_proc.weights.quantized.layer_rules import HEAD, expression, first_match, is_listed
from octavo.worker_proc.weights.quantized.layout import Layout
from octavo.worker_proc.weights.quantized.matrix import StoredMatrix
from octavo.worker_proc.weights.quantized.tuning import AUTO_ROUND

_ACTIVATIONS = ("act_group_size", "act_data_type", "act_sym", "act_dynamic")
"""Keys that have no effect if activations have 16 bits (`act_bits`)."""
_PACKING = ("auto_round:auto_gptq", "auto_round:gptq", "auto_round:gptqmodel", "auto_round:auto_awq", "auto_round:awq")
_OF_LAYER = (*("bits", "group_size", "sym", "data_type", "act_bits"), *_ACTIVATIONS, *AUTO_ROUND)


class AutoRound:
    """See `octavo.worker_proc.weights.quantized.assembly.Format`."""

    markers: tuple[str, ...] = gptq.Gptq.markers
    parts: tuple[str, ...] = gptq.Gptq.parts

    def __init__(self, config: Mapping[str, Any]) -> None:
        config = CheckedConfig(config, "quantization_config")
        ignore(config, "quant_method", *_ACTIVATIONS, *AUTO_ROUND)
        packing = _packing(config)
        self._is_awq = "awq" in packing
        self._zero_bias = 1 if "gptq" in packing and "gptqmodel" not in packing else 0
        self._settings = gptq.Settings.of(config)
        self._is_symmetric = optional(config, "sym", True)
        _check_integers(config, "quantization_config")
        self._blocks = _flat(config.get("block_name_to_quantize") or config.get("to_quant_block_names"))
        self._skipped: list[str] = optional(config, "modules_to_not_convert", [])
        others: dict[str, Any] = optional(config, "extra_config", {})
        self._settings_of = {layer: self._of_layer(layer, changes) for layer, changes in others.items()}
        config.reject_unread("auto-round")

    def _of_layer(self, layer: str, changes: Any) -> gptq.Settings | None:
        """Return the settings of a layer; `None` if it is not quantized."""
        if not isinstance(changes, Mapping):
            raise ConfigError(
                f"config.json: {layer!r} in 'extra_config' of 'quantization_config' is {changes!r}; expected an object"
            )
        changes = {key: value for key, value in changes.items() if value is not None}
        if unknown := sorted(changes.keys() - {*_OF_LAYER}):
            raise ConfigError(
                f"config.json: {unknown[0]!r} of {layer!r} in 'extra_config' of 'quantization_config' is not supported"
            )
        if optional(changes, "bits", self._settings.bits) >= 16:
            return None
        own = {"bits": self._settings.bits, "group_size": self._settings.group_size}
        _check_integers(changes, f"extra_config of {layer}")
        return gptq.Settings.of({**own, **changes})

    def _chosen(self, layer: str) -> gptq.Settings | None:
        """Return the settings of a layer: those under its name, or those of the first pattern that occurs in it."""
        if layer in self._settings_of:
            return self._settings_of[layer]
        return first_match(self._settings_of, layer, _is_found, self._settings)

    def layout(self, layer: str) -> Layout | None:
        """Return the memory layout of a layer."""
        settings = self._chosen(layer)
        is_in_block = layer != HEAD and (not self._blocks or f"{layer}.".startswith(self._blocks))
        if settings is None or is_listed(layer, self._skipped) or not (is_in_block or layer in self._settings_of):
            return None
        group_size = None if settings.group_size == -1 else settings.group_size
        has_zeros = self._is_awq or not self._is_symmetric
        return Layout(8 if settings.bits == 8 else 4, group_size, has_zeros=has_zeros)

    def matrix(self, layer: str, tensors: Mapping[str, Tensor]) -> StoredMatrix:
        """Return the matrix of a layer."""
        settings = self._chosen(layer)
        if settings is None:
            raise ConfigError(
                f"config.json: 'extra_config' in 'quantization_config' gives {layer!r} 16 bits or more, and the "
                "checkpoint holds it quantized",
                hint="check that config.json belongs to the checkpoint",
            )
        if not self._is_awq:
            return gptq.integer_matrix(layer, tensors, settings.bits, settings.group_size, self._zero_bias)
        if settings.bits != 4:
            raise ConfigError(f"{layer!r} has {settings.bits} bits packed as AWQ, which has 4 only")
        return awq.integer_matrix(layer, tensors, settings.group_size)


def _is_found(pattern: str, layer: str) -> bool:
    is_expression = re.search(r"[*+?^$()\[\]{}|\\]", pattern) is not None
    return is_expression and expression(pattern).search(layer) is not None


def _packing(config: Mapping[str, Any]) -> str:
    """Return the packing of integers.

    Raises:
        ConfigError: octavo does not read this packing.
    """
    key = "packing_format" if config.get("packing_format") else "backend"
    ignore(config, "backend")
    packing = str(config.get(key) or _PACKING[0])
    layout = packing.removesuffix(":exllamav2").removesuffix(":tritonv2").removesuffix(":triton")
    if layout not in ("auto_round", "auto", "gptq", "awq", *_PACKING):
        raise ConfigError(
            f"config.json: {key!r} in 'quantization_config' is {packing!r}; only auto_round, {', '.join(_PACKING)} are "
            "supported",
            hint="export the model in the format llm_compressor or auto_round",
        )
    return _PACKING[0] if layout == "auto" else packing


def _check_integers(config: Mapping[str, Any], section: str) -> None:
    if (kind := optional(config, "data_type", "int")) != "int":
        raise ConfigError(
            f"config.json: 'data_type' in {section!r} is {kind!r}; of AutoRound's formats only integers are supported",
            hint="export the model in the format llm_compressor",
        )
    if optional(config, "act_bits", 16) < 16:
        raise ConfigError(
            f"config.json: 'act_bits' in {section!r} is {config['act_bits']}; of AutoRound's formats only those with "
            "activations of 16 bits are supported",
            hint="export the model in the format llm_compressor",
        )


def _flat(blocks: Any) -> tuple[str, ...]:
    """Return the listed name prefixes, each up to a dot, from lists of lists or comma-separated names."""
    if blocks is None:
        return ()
    if isinstance(blocks, str):
        return tuple(f"{name.strip().rstrip('.')}." for name in blocks.split(","))
    if not isinstance(blocks, list):
        raise ConfigError(
            f"config.json: 'block_name_to_quantize' in 'quantization_config' has {blocks!r}; expected names of blocks"
        )
    return tuple(name for part in blocks for name in _flat(part))
