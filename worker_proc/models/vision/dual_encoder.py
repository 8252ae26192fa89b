"""The towers of `CLIPModel` and `SiglipModel`: an image becomes one vector, which no language model reads."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from octavo.protocol.media import MediaTensor
from octavo.worker_proc.models.layers.activation import PLAIN
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.vision.clip import (
    CLIP_DEFAULTS,
    SIGLIP_DEFAULTS,
    ClipConfig,
    ClipEmbedding,
    SiglipEmbedding,
    clip_layers,
    clip_rules,
)
from octavo.worker_proc.models.vision.llava import LlavaTower
from octavo.worker_proc.models.vision.tower import Floats, Patches, TowerSpec
from octavo.worker_proc.pooling.heads import Dense, HeadNorm, PoolingHead

_UNUSED = ("add_cross_attention", "tie_word_embeddings")
"""Unused keys of older files."""


@dataclass(slots=True, eq=False)
class AttentionPool:
    """Attention of one learned query over the patches, and an mlp: SigLIP. In float32 on the host.

    The query is the same for all images. So scores are products with one vector per head, and values are computed after
    the weighted sum: for one row per head instead of one per patch.
    """

    num_heads: int
    activation: str
    probe: Tensor
    in_weight: Tensor
    in_bias: Tensor
    out: Dense
    norm: HeadNorm
    fc1: Dense
    fc2: Dense
    _queries_HD: Floats = field(init=False)
    _values_HKD: Floats = field(init=False)
    _value_bias_D: Floats = field(init=False)

    @classmethod
    def new(cls, parameters: Parameters, config: ClipConfig) -> "AttentionPool":
        """Make the head of a tower."""
        width, inner_width = config.width, config.inner_width

        def tensor(name: str, *shape: int) -> Tensor:
            return parameters.new(f"head.{name}", *shape, dtype=torch.float32)

        return cls(
            config.num_heads,
            config.activation,
            tensor("probe", 1, 1, width),
            tensor("attention.in_proj_weight", 3 * width, width),
            tensor("attention.in_proj_bias", 3 * width),
            Dense.new(parameters, "head.attention.out_proj", width, width, has_bias=True),
            HeadNorm.new(parameters, "head.layernorm", width, config.eps, has_bias=True),
            Dense.new(parameters, "head.mlp.fc1", width, inner_width, has_bias=True),
            Dense.new(parameters, "head.mlp.fc2", inner_width, width, has_bias=True),
        )

    def prepare(self) -> None:
        """Read the weights. Called before the first image."""
        for layer in (self.out, self.norm, self.fc1, self.fc2):
            layer.prepare()
        probe, in_weight, in_bias = (x.detach().cpu().numpy() for x in (self.probe, self.in_weight, self.in_bias))
        query_DD, key_DD, value_DD = in_weight.reshape(3, -1, probe.shape[-1])
        query_bias_D, _, self._value_bias_D = in_bias.reshape(3, -1)
        query_D = query_DD @ probe.ravel() + query_bias_D
        head_dim = len(query_D) // self.num_heads
        queries_HK = query_D.reshape(self.num_heads, head_dim) * np.float32(head_dim**-0.5)
        # The bias of keys adds the same number to the scores of all patches.
        keys_HKD = key_DD.reshape(self.num_heads, head_dim, -1)
        self._queries_HD = np.matmul(queries_HK[:, None], keys_HKD)[:, 0]
        self._values_HKD = value_DD.reshape(self.num_heads, head_dim, -1)

    def __call__(self, rows_RD: Floats) -> Floats:
        """Return one row for the rows of all patches."""
        scores_HR = self._queries_HD @ rows_RD.T
        weights_HR = np.exp(scores_HR - scores_HR.max(axis=1, keepdims=True))
        weights_HR /= weights_HR.sum(axis=1, keepdims=True)
        pooled_HD = weights_HR @ rows_RD
        values_D = np.matmul(self._values_HKD, pooled_HD[:, :, None]).ravel() + self._value_bias_D
        x_D = self.out(values_D)
        inner_F = PLAIN[self.activation](torch.from_numpy(self.fc1(self.norm(x_D)))[None])[0].numpy()
        return x_D + self.fc2(inner_F)


class DualEncoderTower(LlavaTower):
    """The tower; its `pooling_head` follows the one row of an image."""

    attention_pool: AttentionPool | None = None
    """Reduces the rows of the patches to one row; `None` if the class token's row is the image's."""

    def patches(self, tensors: Mapping[str, MediaTensor]) -> list[Patches]:
        """See `MediaTower.patches`."""
        (sequence,) = super().patches(tensors)
        if self.attention_pool is not None:
            return [sequence]
        return [Patches(sequence.rows_TP, sequence.positions_T, np.zeros(1, dtype=np.int64))]

    def arrange(self, rows_RD: Tensor, tensors: Mapping[str, MediaTensor]) -> Tensor:
        """See `MediaTower.arrange`."""
        if self.attention_pool is None:
            return rows_RD
        return torch.from_numpy(self.attention_pool(rows_RD.float().numpy()))[None]

    def prepare(self, max_model_len: int) -> None:
        """See `octavo.worker_proc.models.base.Model`."""
        if self.attention_pool is not None:
            self.attention_pool.prepare()


def build(spec: TowerSpec) -> DualEncoderTower:
    """Make the tower; its parameters are uninitialized.

    Raises:
        ConfigError: something in the configuration is not supported.
    """
    section, is_clip = spec.facts.hf_config["vision_config"], spec.facts.architecture == "CLIPModel"
    defaults = CLIP_DEFAULTS if is_clip else SIGLIP_DEFAULTS
    clip = ClipConfig.read(section, defaults, has_class_token=is_clip, unused=_UNUSED)
    parameters = Parameters(spec.placement, prefixes=["vision_model."], ignored=[r"position_ids$"], rules=clip_rules())
    tower = DualEncoderTower(
        parameters,
        [clip.shape] * clip.num_layers,
        width=clip.width,
        patch_width=clip.patch_width,
        max_item_rows=clip.num_positions,
        embed=(ClipEmbedding if is_clip else SiglipEmbedding)(parameters, clip),
        layers=clip_layers(parameters, clip, clip.num_layers),
        project=LayerNorm.new(parameters, "post_layernorm", clip.width, clip.eps),
        library=spec.library,
    )
    tower.clip, tower.first = clip, 0
    if is_clip:
        projection = Dense.new(parameters, "visual_projection", clip.width, spec.facts.vector_width, has_bias=False)
        tower.pooling_head = PoolingHead([projection])
    else:
        tower.attention_pool, tower.pooling_head = AttentionPool.new(parameters, clip), PoolingHead()
    return tower
