"""The towers of CLIP and SigLIP: learned positions, norms before blocks; CLIP has a class token before the patches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from octavo.kernels.embedding import embedding
from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.errors import ConfigError, ProtocolError
from octavo.worker_proc.models.base import Norm
from octavo.worker_proc.models.checkpoint import Rule, Values, renamed
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional, required
from octavo.worker_proc.models.layers.activation import PLAIN, activation
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import PreNormLayer
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.mlp import Mlp
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.layers.row_norms import RowNorms
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.vision.tower import Floats, Patches, square_patches

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
            section: section to read.
            defaults: values for missing sizes.
            has_class_token: whether a class token comes before the patches.
            unused: keys that have no effect.

        Raises:
            ConfigError: a value is not supported.
        """
        config = CheckedConfig(
            {**defaults, **{key: value for key, value in section.items() if value is not None}}, "vision_config"
        )
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
        config.reject_unread("a vision tower")
        if read.image_size % read.patch_size or read.width % read.num_heads:
            raise ConfigError("config.json: the sizes of 'vision_config' do not divide each other")
        return read

    @property
    def side(self) -> int:
        """Number of patches on each side of an image."""
        return self.image_size // self.patch_size

    @property
    def patch_width(self) -> int:
        """Number of values of a patch."""
        return self.num_channels * self.patch_size**2

    @property
    def num_positions(self) -> int:
        """Number of patches of an image of the tower's size, plus the class token."""
        return self.side**2 + self.has_class_token

    @property
    def shape(self) -> AttentionShape:
        """Shape of the attention of all layers."""
        head_dim = self.width // self.num_heads
        return AttentionShape(self.num_heads, self.num_heads, head_dim, head_dim**-0.5, is_causal=False)

    def sequence(self, pixels_CHW: Floats, *, first: int) -> Patches:
        """Return a sequence: a row of zeros for the class token, if there is one, and the patches of an image.

        Args:
            pixels_CHW: pixels of the tower's size.
            first: first position whose result is a prompt row.

        Raises:
            ProtocolError: the image has another size.
        """
        self.check_picture(pixels_CHW)
        rows_TP = np.zeros((self.num_positions, self.patch_width), dtype=np.float32)
        rows_TP[int(self.has_class_token) :] = square_patches(pixels_CHW, self.patch_size)
        return Patches(rows_TP, np.arange(self.num_positions), np.arange(first, self.num_positions))

    def check_picture(self, pixels_CHW: Floats) -> None:
        """Check that an image has the size of the tower.

        Raises:
            ProtocolError: the image has another size.
        """
        size = self.num_channels, self.image_size, self.image_size
        if pixels_CHW.shape != size:
            raise ProtocolError(f"pixel_values of shape {pixels_CHW.shape} for a tower of {size}")


def clip_rules() -> list[Rule]:
    """Return the rules for the tensors of a checkpoint."""
    return [renamed(_NAMES), _flat_patches]


def clip_ignored(num_layers: int, of: int) -> list[str]:
    """Return the tensors that are not loaded: those after the first `num_layers` of all `of` layers."""
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
SIGLIP_DEFAULTS = {
    **CLIP_DEFAULTS,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
"""Values that `transformers` leaves out of files."""


class SiglipEmbedding:
    """Patches through a linear layer, plus positions."""

    def __init__(self, parameters: Parameters, config: ClipConfig) -> None:
        self._patch = Linear.new(parameters, "patch_embedding", config.patch_width, config.width, bias=True)
        self._positions_LD = parameters.new("position_embedding.weight", config.num_positions, config.width)

    def __call__(self, patches_TP: Tensor, positions_T: Tensor) -> Tensor:
        """Return the residual stream before the first layer."""
        return self._patch(patches_TP) + embedding(positions_T, self._positions_LD)


class ClipEmbedding:
    """Patches through a linear layer, plus positions. The first position is the class token's.

    The class token's patch is zeros, so that the linear layer, which has no bias, adds nothing to it. The bias of
    InternVL's layer is added to the positions of patches.

    Args:
        parameters: parameters of the tower.
        config: tower configuration.
        has_bias: whether the patch projection has a bias.
        has_norm: whether a norm follows.
    """

    def __init__(
        self, parameters: Parameters, config: ClipConfig, *, has_bias: bool = False, has_norm: bool = True
    ) -> None:
        self._patch = Linear.new(parameters, "patch_embedding", config.patch_width, config.width, bias=False)
        self._class_D = parameters.new("class_embedding", config.width)
        self._positions_LD = parameters.new("position_embedding.weight", config.num_positions, config.width)
        self._bias_D = parameters.new("patch_embedding.bias", config.width) if has_bias else None
        self._norm = LayerNorm.new(parameters, "pre_norm", config.width, config.eps) if has_norm else None
        self._table_LD: Tensor | None = None

    def __call__(self, patches_TP: Tensor, positions_T: Tensor) -> Tensor:
        """Return the residual stream before the first layer."""
        if self._table_LD is None:
            self._table_LD = self._positions_LD.clone()
            self._table_LD[0] += self._class_D
            if self._bias_D is not None:
                self._table_LD[1:] += self._bias_D
        rows_TD = self._patch(patches_TP) + embedding(positions_T, self._table_LD)
        return rows_TD if self._norm is None else self._norm(rows_TD)


def clip_layers(
    parameters: Parameters,
    config: ClipConfig,
    num_layers: int,
    *,
    norm: Callable[[str], Norm] | None = None,
    has_qkv_bias: bool = True,
    row_norms: Callable[[str], RowNorms] | None = None,
) -> list[PreNormLayer]:
    """Make the first layers of the tower.

    Args:
        parameters: parameters of the tower.
        config: tower configuration.
        num_layers: number of layers.
        norm: makes a norm before a block, given its name; `None` means a layer norm.
        has_qkv_bias: whether the projections of queries, keys and values have biases.
        row_norms: makes the norms of queries and keys, given the name of their block; `None` if there are none.
    """
    norm = norm or (lambda name: LayerNorm.new(parameters, name, config.width, config.eps))

    def layer(index: int) -> PreNormLayer:
        name = f"layers.{index}"
        attention = SelfAttention(
            parameters,
            f"{name}.self_attn",
            index,
            config.shape,
            config.width,
            rotary=None,
            has_qkv_bias=has_qkv_bias,
            has_output_bias=True,
            row_norms=row_norms(f"{name}.self_attn") if row_norms else None,
        )
        mlp = Mlp(
            parameters, f"{name}.mlp", config.width, config.inner_width, activation=config.activation, has_bias=True
        )
        return PreNormLayer(norm(f"{name}.layer_norm1"), attention, norm(f"{name}.layer_norm2"), mlp)

    return [layer(index) for index in range(num_layers)]


def _flat_patches(name: str, values: Values) -> Iterator[tuple[str, Values]]:
    """Reshape the weight of a convolution over patches to that of a linear layer."""
    yield name, values.flatten(1) if isinstance(values, Tensor) and name == "patch_embedding.weight" else values
