"""The towers of CLIP and SigLIP: learned positions, norms before blocks; CLIP has a class token before the patches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from octavo.kernels.embedding import embedding
from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.errors import ConfigError, ProtocolError
from octavo.protocol.media import MediaTensor
from octavo.worker_proc.models.checkpoint import Rule, Values, renamed
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional, required
from octavo.worker_proc.models.layers.activation import PLAIN, activation
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import PreNormLayer
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.mlp import Mlp
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.vision.tower import Patches, array_of, square_patches

_NAMES = {
    r"^encoder\.layers\.": "layers.",
    r"\.self_attn\.out_proj\.": ".self_attn.o_proj.",
    r"^pre_layrnorm\.": "pre_norm.",
    r"^embeddings\.": "",
}


@dataclass(frozen=True, slots=True)
class ClipConfig:
    """Sizes of the tower."""

    width: int
    inner_width: int
    num_layers: int
    num_heads: int
    num_channels: int
    image_size: int
    patch_size: int
    activation: str
    eps: float
    has_class_token: bool

    @classmethod
    def read(
        cls,
        section: Mapping[str, Any],
        defaults: Mapping[str, Any],
        *,
        has_class_token: bool = True,
        unused: Sequence[str] = (),
    ) -> "ClipConfig":
        """Read `vision_config`.

        Args:
            section: to read.
            defaults: for sizes that it lacks.
            has_class_token: whether one comes before the patches.
            unused: keys that change nothing.

        Raises:
            ConfigError: a value is not supported.
        """
        config = CheckedConfig({**defaults, **{key: value for key, value in section.items() if value is not None}})
        ignore(config, "projection_dim", "vision_use_head", *unused)
        read = cls(
            width=required(config, "hidden_size", int),
            inner_width=required(config, "intermediate_size", int),
            num_layers=required(config, "num_hidden_layers", int),
            num_heads=required(config, "num_attention_heads", int),
            num_channels=optional(config, "num_channels", 3),
            image_size=required(config, "image_size", int),
            patch_size=required(config, "patch_size", int),
            activation=activation(config, "", PLAIN),
            eps=required(config, "layer_norm_eps", float),
            has_class_token=has_class_token,
        )
        config.reject_unread("a vision tower", section="vision_config")
        if read.image_size % read.patch_size or read.width % read.num_heads:
            raise ConfigError("config.json: the sizes of 'vision_config' do not divide each other")
        return read

    @property
    def patch_width(self) -> int:
        """Numbers of a patch."""
        return self.num_channels * self.patch_size**2

    @property
    def num_positions(self) -> int:
        """Patches of an image of the tower's size, and the class token."""
        return (self.image_size // self.patch_size) ** 2 + self.has_class_token

    @property
    def shape(self) -> AttentionShape:
        """Of the attention of all layers."""
        head_dim = self.width // self.num_heads
        return AttentionShape(self.num_heads, self.num_heads, head_dim, head_dim**-0.5, is_causal=False)

    def patches(self, tensors: Mapping[str, MediaTensor], *, has_class: bool) -> list[Patches]:
        """Return the sequence of an image: a row of zeros for the class token, and its patches.

        Raises:
            ProtocolError: the image has another size.
        """
        (pixels_CHW, *others) = array_of(tensors, "pixel_values", np.float32, 4)
        size = self.num_channels, self.image_size, self.image_size
        if others or pixels_CHW.shape != size:
            raise ProtocolError(f"pixel_values of shape {pixels_CHW.shape} for a tower of {size}")
        rows_TP = np.zeros((self.num_positions, self.patch_width), dtype=np.float32)
        rows_TP[1:] = square_patches(pixels_CHW, self.patch_size)
        return [Patches(rows_TP, np.arange(self.num_positions), np.arange(0 if has_class else 1, self.num_positions))]


def clip_rules() -> list[Rule]:
    """Return what becomes of the tensors of a checkpoint."""
    return [renamed(_NAMES), _flat_patches]


def clip_ignored(num_layers: int, of: int) -> list[str]:
    """Return the tensors that are not loaded: what comes after the first `num_layers` of all `of` layers."""
    unused = "|".join(map(str, range(num_layers, of)))
    return [r"^post_layernorm\.", r"position_ids$", *([rf"^layers\.({unused})\."] if unused else [])]


CLIP_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
"""What `transformers` leaves out of files."""


class SiglipEmbedding:
    """Patches through a linear layer, plus positions."""

    def __init__(self, parameters: Parameters, config: ClipConfig) -> None:
        self._patch = Linear.new(parameters, "patch_embedding", config.patch_width, config.width, bias=True)
        self._positions_LD = parameters.new("position_embedding.weight", config.num_positions, config.width)

    def __call__(self, patches_TP: Tensor, positions_T: Tensor) -> Tensor:
        """Return the residual stream before the first layer."""
        return self._patch(patches_TP) + embedding(positions_T, self._positions_LD)


class ClipEmbedding:
    """Patches through a linear layer, plus positions. The first position has the class token.

    Its patch is zeros, so that the linear layer, which has no bias, adds nothing to it.
    """

    def __init__(self, parameters: Parameters, config: ClipConfig) -> None:
        self._patch = Linear.new(parameters, "patch_embedding", config.patch_width, config.width, bias=False)
        self._class_D = parameters.new("class_embedding", config.width)
        self._positions_LD = parameters.new("position_embedding.weight", config.num_positions, config.width)
        self._norm = LayerNorm.new(parameters, "pre_norm", config.width, config.eps)
        self._table_LD: Tensor | None = None

    def __call__(self, patches_TP: Tensor, positions_T: Tensor) -> Tensor:
        """Return the residual stream before the first layer."""
        if self._table_LD is None:
            self._table_LD = self._positions_LD.clone()
            self._table_LD[0] += self._class_D
        return self._norm(self._patch(patches_TP) + embedding(positions_T, self._table_LD))


def clip_layers(parameters: Parameters, config: ClipConfig, num_layers: int) -> list[PreNormLayer]:
    """Make the first layers of the tower."""
    norm = partial(LayerNorm.new, parameters, width=config.width, eps=config.eps)

    def layer(index: int) -> PreNormLayer:
        name = f"layers.{index}"
        attention = SelfAttention(
            parameters,
            f"{name}.self_attn",
            index,
            config.shape,
            config.width,
            rotary=None,
            has_qkv_bias=True,
            has_output_bias=True,
        )
        mlp = Mlp(
            parameters, f"{name}.mlp", config.width, config.inner_width, activation=config.activation, has_bias=True
        )
        return PreNormLayer(norm(f"{name}.layer_norm1"), attention, norm(f"{name}.layer_norm2"), mlp)

    return [layer(index) for index in range(num_layers)]


def _flat_patches(name: str, values: Values) -> Iterator[tuple[str, Values]]:
    """Make the weight of a convolution over patches that of a linear layer."""
    yield name, values.flatten(1) if isinstance(values, Tensor) and name == "patch_embedding.weight" else values
