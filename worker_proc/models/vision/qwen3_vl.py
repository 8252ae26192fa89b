"""The tower of Qwen3-VL: that of Qwen2-VL with learned positions, and rows for several layers of the language model."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from torch import Tensor

from octavo.protocol.errors import ConfigError
from octavo.protocol.media import MediaTensor
from octavo.worker_proc.batch.inputs import Ints
from octavo.worker_proc.models.base import Residual, Tables
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional
from octavo.worker_proc.models.layers.activation import PLAIN, activation
from octavo.worker_proc.models.layers.mlp import Mlp
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.vision.qwen_vl import (
    EPS,
    UNUSED,
    QwenTower,
    QwenVisionConfig,
    assemble,
    check_width,
    patches_and_grid,
)
from octavo.worker_proc.models.vision.tower import Floats, Patches, TowerSpec, places_of_patches, theta_of


class Qwen3Tower(QwenTower):
    """The tower with its projectors."""

    positions_LD: Tensor
    """Learned positions, on a square grid."""
    _host_table_LD: Floats | None = None

    def _table(self) -> Floats:
        """Return the position table on the host."""
        if self._host_table_LD is None:
            self._host_table_LD = self.positions_LD.float().cpu().numpy()
        return self._host_table_LD

    def patches(self, tensors: Mapping[str, MediaTensor]) -> list[Patches]:
        """See `MediaTower.patches`: each patch also has a position, interpolated in the table."""
        _, (_, height, width) = patches_and_grid(tensors, self.merge_size)
        places_2T = places_of_patches(height, width, self.merge_size)
        positions_TD = interpolated(self._table(), places_2T, (height, width))
        return [replace(frame, tables=(*frame.tables, positions_TD)) for frame in super().patches(tensors)]

    def begin(self, token_ids_T: Tensor, positions_T: Tensor) -> tuple[Residual, Tables]:
        """See `octavo.worker_proc.models.base.LayeredModel`."""
        residual, (cos_TC, sin_TC, positions_TD) = super().begin(token_ids_T, positions_T)
        if self.library is None:  # native programs round sums to the model's type themselves
            positions_TD = positions_TD.to(self.dtype)
        return Residual(residual.hidden_TD + positions_TD), (cos_TC, sin_TC)


def interpolated(table_LD: Floats, places_2T: Ints, sizes: tuple[int, int]) -> Floats:
    """Return the values at grid places of a square table that is stretched over the grid from corner to corner."""
    side = round(len(table_LD) ** 0.5)
    exact_2T = places_2T.astype(np.float32) * (side - 1) / np.maximum(np.array(sizes, dtype=np.float32) - 1, 1)[:, None]
    lower_2T = np.floor(exact_2T).astype(np.int64)
    shares_2T = (exact_2T - lower_2T).astype(np.float32)
    total_TD = np.zeros((places_2T.shape[1], table_LD.shape[1]), dtype=np.float32)
    for row_step, column_step in product((0, 1), repeat=2):
        rows_T, columns_T = np.minimum(lower_2T + np.array([[row_step], [column_step]]), side - 1)
        weights_T = np.abs(1 - row_step - shares_2T[0]) * np.abs(1 - column_step - shares_2T[1])
        total_TD += table_LD[rows_T * side + columns_T] * weights_T[:, None]
    return total_TD


def _read(section: Mapping[str, Any], spec: TowerSpec) -> QwenVisionConfig:
    """Return the sizes in `vision_config`.

    Raises:
        ConfigError: a value is not supported.
    """
    config = CheckedConfig(section, "vision_config")
    ignore(config, *UNUSED)
    channels, frames = optional(config, "in_channels", 3), optional(config, "temporal_patch_size", 2)
    own = QwenVisionConfig(
        width=optional(config, "hidden_size", 1152),
        inner_width=optional(config, "intermediate_size", 4304),
        num_layers=optional(config, "depth", 27),
        num_heads=optional(config, "num_heads", 16),
        patch_width=channels * frames * optional(config, "patch_size", 16) ** 2,
        merge_size=optional(config, "spatial_merge_size", 2),
        activation=activation(config, "gelu_pytorch_tanh", PLAIN),
        theta=theta_of(config),
        has_patch_bias=True,
        num_positions=optional(config, "num_position_embeddings", 2304),
        deeper_layers=tuple(optional(config, "deepstack_visual_indexes", [8, 16, 24])),
    )
    check_width(optional(config, "out_hidden_size", 3584), spec)
    config.reject_unread("a vision tower")
    if round(own.num_positions**0.5) ** 2 != own.num_positions:
        raise ConfigError(f"config.json: 'num_position_embeddings' is {own.num_positions}; expected a square")
    layers = own.deeper_layers
    if list(layers) != sorted(set(layers)) or any(not 0 <= layer < own.num_layers for layer in layers):
        raise ConfigError(f"config.json: 'deepstack_visual_indexes' is {list(layers)}; expected layers in order")
    return own


def build(spec: TowerSpec) -> Qwen3Tower:
    """Make the tower; its parameters are uninitialized.

    Raises:
        ConfigError: something in the configuration is not supported.
    """
    own = _read(spec.facts.hf_config["vision_config"], spec)

    def norm(parameters: Parameters, name: str) -> LayerNorm:
        return LayerNorm.new(parameters, name, own.width, EPS)

    def mlp(parameters: Parameters, name: str) -> Mlp:
        return Mlp(parameters, name, own.width, own.inner_width, activation=own.activation, has_bias=True)

    tower = assemble(Qwen3Tower, spec, own, norm, mlp, shapes=[own.shape] * own.num_layers)
    tower.positions_LD = tower.parameters.new("pos_embed.weight", own.num_positions, own.width)
    return tower
