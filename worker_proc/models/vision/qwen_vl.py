"""The tower of Qwen2-VL: patches of images of any size, rotated by row and column; a square is a row of the prompt."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.errors import ConfigError, ProtocolError
from octavo.protocol.media import MediaTensor
from octavo.worker_proc.batch.inputs import Ints
from octavo.worker_proc.models.base import Norm
from octavo.worker_proc.models.checkpoint import Rule, Values, renamed, split_rows, stacked_qkv
from octavo.worker_proc.models.features import Features
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional, required
from octavo.worker_proc.models.layers.activation import PLAIN, activation
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import MlpBlock, PreNormLayer
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.mlp import Mlp
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.layers.rotary import Rotary
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.vision.tower import (
    MediaTower,
    MergedProjection,
    Patches,
    TowerSpec,
    array_of,
    pixels_of,
    places_of_patches,
    theta_of,
)

EPS = 1e-6
_NAMES = {
    r"^blocks\.": "layers.",
    r"\.attn\.proj\.": ".attn.o_proj.",
    r"^patch_embed\.proj\.": "patch_embed.",
    r"^merger\.mlp\.0\.": "merger.fc1.",
    r"^merger\.mlp\.2\.": "merger.fc2.",
    r"\.linear_fc([12])\.": r".fc\1.",
    r"^merger\.norm\.": "merger.ln_q.",
}
_READ_ELSEWHERE = (
    *("text_config", "vision_config", "image_token_id", "video_token_id", "vision_start_token_id"),
    *("vision_end_token_id", "vision_token_id", "tie_word_embeddings"),
)
UNUSED = ("spatial_patch_size", "tokens_per_second", "in_chans")
"""Keys of `vision_config` that repeat `temporal_patch_size` and `in_channels`, or are not used."""


@dataclass(frozen=True, slots=True)
class QwenVisionConfig:
    """Sizes of the tower."""

    width: int
    inner_width: int
    num_layers: int
    num_heads: int
    patch_width: int
    """Number of values of a patch, over all its frames."""
    merge_size: int
    """Number of patches on each side of a square, which becomes a prompt row."""
    activation: str
    theta: float
    """Base of the rotary angles."""
    has_patch_bias: bool = False
    num_positions: int = 0
    """Size of the square table of learned positions that are added to patches; 0 if there is none."""
    deeper_layers: tuple[int, ...] = ()
    """Layers whose results are read in addition (DeepStack)."""

    @classmethod
    def read(cls, section: Mapping[str, Any], spec: TowerSpec) -> "QwenVisionConfig":
        """Read `vision_config` of Qwen2-VL.

        Raises:
            ConfigError: a value is not supported.
        """
        config = CheckedConfig(section, "vision_config")
        ignore(config, *UNUSED)
        width = optional(config, "embed_dim", 1280)
        channels, frames = optional(config, "in_channels", 3), optional(config, "temporal_patch_size", 2)
        read = cls(
            width=width,
            inner_width=int(width * float(optional(config, "mlp_ratio", 4))),
            num_layers=optional(config, "depth", 32),
            num_heads=optional(config, "num_heads", 16),
            patch_width=channels * frames * optional(config, "patch_size", 14) ** 2,
            merge_size=optional(config, "spatial_merge_size", 2),
            activation=activation(config, "quick_gelu", PLAIN),
            theta=theta_of(config),
        )
        check_width(required(config, "hidden_size", int), spec)
        config.reject_unread("a vision tower")
        return read

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.width // self.num_heads

    @property
    def shape(self) -> AttentionShape:
        """Shape of the attention of all layers."""
        return AttentionShape(self.num_heads, self.num_heads, self.head_dim, self.head_dim**-0.5, is_causal=False)


class QwenTower(MediaTower):
    """The tower with its projector."""

    merge_size: int
    rotary: Rotary
    """Rotary angles for half a head: its first half rotates by the patch's row, its second by the column."""

    def patches(self, tensors: Mapping[str, MediaTensor]) -> list[Patches]:
        """See `MediaTower.patches`: one sequence per frame, its patches in order of squares."""
        rows_TP, grid = patches_and_grid(tensors, self.merge_size)
        places_2T = places_of_patches(grid[1], grid[2], self.merge_size)
        angles = self.angles_at(places_2T)
        num_patches = places_2T.shape[1]
        all_T = np.arange(num_patches)
        frames = np.split(rows_TP, grid[0])
        return [Patches(frame_TP, np.zeros(num_patches, dtype=np.int64), all_T, angles) for frame_TP in frames]

    def angles_at(self, places_2T: Ints) -> tuple[Any, Any]:
        """Return cosines and sines of patches at the given rows and columns, each of shape TC."""
        self.rotary.prepare(int(places_2T.max()) + 1, torch.device("cpu"))
        rows, columns = (self.rotary.angles(torch.from_numpy(places_T)) for places_T in places_2T)
        cos, sin = (torch.cat(parts, dim=1).numpy() for parts in zip(rows, columns, strict=True))
        return cos, sin


def patches_and_grid(tensors: Mapping[str, MediaTensor], merge_size: int) -> tuple[Any, list[int]]:
    """Return the patches of an image or of a video's frames, and the numbers of frames, rows and columns of patches.

    Raises:
        ProtocolError: the patches do not form whole squares.
    """
    rows_TP = pixels_of(tensors, "pixel_values", 2)
    (_, height, width), *others = grids = array_of(tensors, "image_grid_thw", np.int64, 2).tolist()
    frames = sum([grid[0] for grid in grids])
    is_one_size = all(grid[1:] == [height, width] for grid in others)
    if not is_one_size or frames * height * width != len(rows_TP) or height % merge_size or width % merge_size:
        raise ProtocolError(f"{len(rows_TP)} patches for a grid of {frames} x {height} x {width}")
    return rows_TP, [frames, height, width]


def check_width(width: int, spec: TowerSpec) -> None:
    """Check the width of the tower's results.

    Raises:
        ConfigError: the width is not that of the language model.
    """
    if width != spec.width:
        raise ConfigError(f"config.json: 'vision_config' makes rows of {width} numbers, not {spec.width}")


Tower = TypeVar("Tower", bound=QwenTower)
MakeNorm = Callable[[Parameters, str], Norm]
MakeMlp = Callable[[Parameters, str], MlpBlock]


# long: arguments take a line each
def assemble(
    kind: type[Tower],
    spec: TowerSpec,
    own: QwenVisionConfig,
    norm: MakeNorm,
    mlp: MakeMlp,
    *,
    shapes: Sequence[AttentionShape],
    max_parts: int = 0,
) -> Tower:
    """Make a tower of this family.

    Args:
        kind: class of the tower.
        spec: what the model is built for.
        own: sizes of this rank's part.
        norm: makes a norm, given its name.
        mlp: makes the mlp of a layer, given its name.
        shapes: shapes of the attention of each layer.
        max_parts: see `MediaTower`.

    Raises:
        ConfigError: `config.json` has unknown keys.
    """
    config = CheckedConfig(spec.facts.hf_config)
    ignore(config, *_READ_ELSEWHERE)
    rows = stacked_qkv(own.num_heads, own.num_heads, own.head_dim)
    rules: list[Rule] = [renamed(_NAMES), split_rows("qkv", rows), _flat_patches]
    prefixes = [f"{outer}{inner}visual." for outer in ("", "vlm.") for inner in ("", "model.")]
    parameters = Parameters(spec.placement, prefixes=prefixes, rules=rules)
    patch = Linear.new(parameters, "patch_embed", own.patch_width, own.width, bias=own.has_patch_bias)
    merged_width = own.width * own.merge_size**2

    def merger(name: str) -> Mlp:
        sizes = merged_width, merged_width
        return Mlp(parameters, name, *sizes, num_outputs=spec.width, activation="gelu", has_bias=True)

    def deeper_merger(name: str) -> Callable[[Tensor], Tensor]:
        deeper_norm, project = LayerNorm.new(parameters, f"{name}.norm", merged_width, EPS), merger(name)
        return lambda rows: project(deeper_norm(rows))

    tower = kind(
        parameters,
        shapes,
        width=own.width,
        patch_width=own.patch_width,
        max_item_rows=spec.max_item_tokens * own.merge_size**2,
        embed=lambda patches_TP, positions_T: patch(patches_TP),
        layers=[_layer(parameters, index, shapes[index], own, norm, mlp) for index in range(own.num_layers)],
        project=norm(parameters, "merger.ln_q"),
        library=spec.library,
        merged=MergedProjection(
            own.merge_size**2,
            merger("merger"),
            [deeper_merger(f"deepstack_merger_list.{index}") for index in range(len(own.deeper_layers))],
        ),
        max_parts=max_parts,
        table_widths=[own.head_dim // 2] * 2 + [own.width] * (own.num_positions > 0),
    )
    if own.deeper_layers:
        tower.features = Features([layer + 1 for layer in own.deeper_layers])
    tower.merge_size = own.merge_size
    tower.rotary = Rotary.of(own.theta, own.head_dim // 4)
    return tower


def _layer(
    parameters: Parameters, index: int, shape: AttentionShape, own: QwenVisionConfig, norm: MakeNorm, mlp: MakeMlp
) -> PreNormLayer:
    name = f"layers.{index}"
    attention = SelfAttention(
        parameters, f"{name}.attn", index, shape, own.width, has_qkv_bias=True, has_output_bias=True
    )
    norms = norm(parameters, f"{name}.norm1"), norm(parameters, f"{name}.norm2")
    return PreNormLayer(norms[0], attention, norms[1], mlp(parameters, f"{name}.mlp"))


def build(spec: TowerSpec) -> QwenTower:
    """Make the tower; its parameters are uninitialized.

    Raises:
        ConfigError: something in the configuration is not supported.
    """
    own = QwenVisionConfig.read(spec.facts.hf_config["vision_config"], spec)

    def norm(parameters: Parameters, name: str) -> LayerNorm:
        return LayerNorm.new(parameters, name, own.width, EPS)

    def mlp(parameters: Parameters, name: str) -> Mlp:
        return Mlp(parameters, name, own.width, own.inner_width, activation=own.activation, has_bias=True)

    return assemble(QwenTower, spec, own, norm, mlp, shapes=[own.shape] * own.num_layers)


def _flat_patches(name: str, values: Values) -> Iterator[tuple[str, Values]]:
    """Reshape the weight of a convolution over patches to that of a linear layer."""
    yield name, values.flatten(1) if isinstance(values, Tensor) and name == "patch_embed.weight" else values
