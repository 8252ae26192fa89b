"""Sections `quantization_config`, and the matrices that octavo assembles from a layer's tensors."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from octavo.worker_proc.models.linear_weight import QuantizedMatrix
from octavo.worker_proc.weights.quantized.assembly import Assembly, open_format

WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
LAYER = "model.layers.3.mlp.up_proj"


def compressed(weights: Mapping[str, Any] = WEIGHTS, **changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**weights}, "input_activations": None, **changes.pop("group", {})}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        "kv_cache_scheme": None,
        **changes,
    }


def assembled(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor | QuantizedMatrix]]:
    form = open_format(config, {})
    assembly = Assembly(form, set(tensors))
    taken = (assembly.take(name, tensor) for name, tensor in tensors.items())
    return [item for item in taken if item is not None]


def of_layer(tensors: Mapping[str, Tensor], layer: str = LAYER) -> dict[str, Tensor]:
    return {f"{layer}.{part}": tensor for part, tensor in tensors.items()}
