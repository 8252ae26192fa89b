"""The tower of Qwen2.5-VL: that of Qwen2-VL, but most layers attend within windows of an image."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from octavo.protocol.errors import ConfigError
from octavo.protocol.media import MediaTensor
from octavo.worker_proc.batch.inputs import Ints
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional, required
from octavo.worker_proc.models.layers.activation import GATED, activation
from octavo.worker_proc.models.layers.mlp import GatedMlp
from octavo.worker_proc.models.layers.norm import RMSNorm
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
from octavo.worker_proc.models.vision.tower import MAX_RUN_SEQUENCES, MIN_RUN_ROWS, Patches, TowerSpec, theta_of


class WindowedTower(QwenTower):
    """The tower with its projector."""

    window: int
    """Number of squares on each side of a window."""

    def patches(self, tensors: Mapping[str, MediaTensor]) -> list[Patches]:
        """See `MediaTower.patches`: the squares of a frame are ordered by window."""
        _, (_, height, width) = patches_and_grid(tensors, self.merge_size)
        order_S, counts = squares_by_window(height // self.merge_size, width // self.merge_size, self.window)
        num_merged = self.merge_size**2

        def rows_of(squares_S: Ints) -> Ints:
            rows: Ints = (squares_S[:, None] * num_merged + np.arange(num_merged)).ravel()
            return rows

        order_T, chosen_R = rows_of(order_S), rows_of(np.argsort(order_S))
        return [
            replace(
                frame,
                rows_TP=frame.rows_TP[order_T],
                chosen_R=chosen_R,
                tables=tuple(table_TC[order_T] for table_TC in frame.tables),
                part_lengths=counts * num_merged,
            )
            for frame in super().patches(tensors)
        ]


def squares_by_window(rows: int, columns: int, side: int) -> tuple[Ints, Ints]:
    """Return the squares of a grid window by window, and the number of squares of each window; edge windows are
    smaller."""
    places_2S = np.indices((rows, columns)).reshape(2, -1) // side
    windows_S = places_2S[0] * -(-columns // side) + places_2S[1]
    return np.argsort(windows_S, kind="stable"), np.bincount(windows_S)


def _read(section: Mapping[str, Any], spec: TowerSpec) -> tuple[QwenVisionConfig, int, set[int]]:
    """Return the sizes in `vision_config`, the number of squares on each side of a window, and the layers without
    windows.

    Raises:
        ConfigError: a value is not supported.
    """
    config = CheckedConfig(section, "vision_config")
    ignore(config, *UNUSED)
    channels, frames = optional(config, "in_channels", 3), optional(config, "temporal_patch_size", 2)
    patch_size = optional(config, "patch_size", 14)
    own = QwenVisionConfig(
        width=required(config, "hidden_size", int),
        inner_width=optional(config, "intermediate_size", 3420),
        num_layers=optional(config, "depth", 32),
        num_heads=optional(config, "num_heads", 16),
        patch_width=channels * frames * patch_size**2,
        merge_size=optional(config, "spatial_merge_size", 2),
        activation=activation(config, "silu", GATED),
        theta=theta_of(config),
    )
    check_width(optional(config, "out_hidden_size", 3584), spec)
    window = optional(config, "window_size", 112) // own.merge_size // patch_size
    if window < 1:
        raise ConfigError("config.json: 'window_size' of 'vision_config' is smaller than a square of patches")
    whole: list[int] = optional(config, "fullatt_block_indexes", [7, 15, 23, 31])
    config.reject_unread("a vision tower")
    return own, window, set(whole)


def build(spec: TowerSpec) -> WindowedTower:
    """Make the tower; its parameters are uninitialized.

    Raises:
        ConfigError: something in the configuration is not supported.
    """
    own, window, whole = _read(spec.facts.hf_config["vision_config"], spec)

    def norm(parameters: Parameters, name: str) -> RMSNorm:
        return RMSNorm.new(parameters, name, own.width, EPS)

    def mlp(parameters: Parameters, name: str) -> GatedMlp:
        return GatedMlp(parameters, name, own.width, own.inner_width, activation=own.activation, has_bias=True)

    tower = assemble(
        WindowedTower,
        spec,
        own,
        norm,
        mlp,
        shapes=[replace(own.shape, is_local=index not in whole) for index in range(own.num_layers)],
        # A line of squares has the most windows: one for each `window` squares, and one for the rest.
        max_parts=max(spec.max_item_tokens, MIN_RUN_ROWS) // window + MAX_RUN_SEQUENCES,
    )
    tower.window = window
    return tower
