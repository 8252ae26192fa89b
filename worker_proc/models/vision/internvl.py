"""InternVL: tiles of an image through InternViT; each square of its results is a row of the prompt."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from octavo.protocol.errors import ConfigError
from octavo.protocol.media import MediaTensor
from octavo.worker_proc.models.base import Norm
from octavo.worker_proc.models.checkpoint import Values, flattened, renamed
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional, reject_unless
from octavo.worker_proc.models.layers.norm import LayerNorm, RMSNorm
from octavo.worker_proc.models.layers.row_norms import norms_of_rows
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.tensor_names import TensorNames
from octavo.worker_proc.models.vision.clip import ClipConfig, ClipEmbedding, clip_layers, clip_rules
from octavo.worker_proc.models.vision.llava import PREFIXES, PROJECTOR_NAMES, READ_ELSEWHERE, projector
from octavo.worker_proc.models.vision.tower import (
    MediaTower,
    MergedProjection,
    Patches,
    TowerSpec,
    order_by_square,
    pixels_of,
)

_DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": [448, 448],
    "patch_size": [14, 14],
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
_READ_HERE = ("attention_bias", "use_qk_norm", "norm_type", "use_mean_pooling", "use_absolute_position_embeddings")
_UNUSED = ("layer_scale_init_value", "projection_dropout", "use_mask_token", "drop_path_rate")
_NAMES = {
    r"^encoder\.layer\.": "layers.",
    r"\.attention\.projection_layer\.": ".self_attn.o_proj.",
    r"\.attention\.": ".self_attn.",
    r"\.layernorm_before\.": ".layer_norm1.",
    r"\.layernorm_after\.": ".layer_norm2.",
    r"^layernorm\.": "post_layernorm.",
    r"^layer_norm\.": "projector_norm.",
    r"^embeddings\.cls_token$": "class_embedding",
    r"^embeddings\.position_embeddings$": "position_embedding.weight",
    r"^embeddings\.patch_embeddings\.projection\.": "patch_embedding.",
}
_PROJECTOR_EPS = 1e-5


class InternTower(MediaTower):
    """The tower with its projector."""

    clip: ClipConfig
    side: int
    """Number of patches on each side of a square, which becomes a prompt row."""

    def patches(self, tensors: Mapping[str, MediaTensor]) -> list[Patches]:
        """See `MediaTower.patches`: one sequence per tile; the first result is the class token's."""
        order_T = order_by_square(self.clip.side, self.side)
        sequences = []
        for tile_CHW in pixels_of(tensors, "pixel_values", 4):
            tile = self.clip.sequence(tile_CHW, first=1)
            sequences.append(Patches(tile.rows_TP, tile.positions_T, 1 + order_T))
        return sequences


class LayerScale:
    """Multiplies the rows of a linear layer by factors, which are a separate tensor in checkpoints.

    Args:
        names: names of the model.
        factors: name of the factor tensor, without prefix.
        layer: name of the layer in checkpoints.
        own: its name in the model.
    """

    def __init__(self, names: TensorNames, factors: str, layer: str, own: str) -> None:
        self._factors_name = factors
        self._own = {f"{layer}.{kind}": f"{own}.{kind}" for kind in ("weight", "bias")}
        self._factors_O: Tensor | None = None
        self._waiting: dict[str, Tensor] = {}
        names.add_split([factors, *self._own], self._take, self._own.values())

    def _take(self, full_name: str, values: Values) -> Iterator[tuple[str, Values]]:
        assert isinstance(values, Tensor), "towers are not quantized"
        if full_name.endswith(self._factors_name):
            self._factors_O = values.float()
        else:
            self._waiting[next(own for name, own in self._own.items() if full_name.endswith(name))] = values
        if self._factors_O is None:
            return
        ready, self._waiting = self._waiting, {}
        for own, part in ready.items():
            factors = self._factors_O[:, None] if part.ndim > 1 else self._factors_O
            yield own, (part.float() * factors).to(part.dtype)


def _clip_config(section: CheckedConfig) -> ClipConfig:
    """Read the sizes of the tower, whose images and patches are square.

    Raises:
        ConfigError: a value is not supported.
    """
    sizes: dict[str, Any] = {}
    for key in ("image_size", "patch_size"):
        given = section.get(key) or _DEFAULTS[key]
        pair = given if isinstance(given, list | tuple) else [given, given]
        if len(pair) != 2 or pair[0] != pair[1]:
            raise ConfigError(f"config.json: {key!r} of 'vision_config' is {given!r}; expected a square")
        sizes[key] = pair[0]
    reject_unless(section, "use_absolute_position_embeddings", [True, None])
    return ClipConfig.read({**section, **sizes}, _DEFAULTS, unused=[*_READ_HERE, *_UNUSED])


def build(spec: TowerSpec) -> InternTower:
    """Make the tower; its parameters are uninitialized.

    Raises:
        ConfigError: something in the configuration is not supported.
    """
    config = CheckedConfig(spec.facts.hf_config)
    ignore(config, *READ_ELSEWHERE)
    section = CheckedConfig(config["vision_config"])
    clip = _clip_config(section)
    reject_unless(config, "vision_feature_layer", [-1, None])
    reject_unless(config, "vision_feature_select_strategy", ["default", None])
    side = round(1 / optional(config, "downsample_ratio", 0.5))
    if clip.side % side:
        raise ConfigError(f"config.json: squares of {side} patches on {clip.side} on each side of a picture")
    rules = [renamed({**_NAMES, **PROJECTOR_NAMES}), *clip_rules(), flattened(r"^class_embedding$"), _flat_table]
    ignored = [r"^embeddings\.mask_token$", r"^mask_token$"]
    parameters = Parameters(spec.placement, prefixes=PREFIXES, ignored=ignored, rules=rules)
    norm = _norm(parameters, clip, optional(section, "norm_type", "layer_norm"))
    has_qk_norm = optional(section, "use_qk_norm", False)
    layers = clip_layers(
        parameters,
        clip,
        clip.num_layers,
        norm=norm,
        has_qkv_bias=optional(section, "attention_bias", False),
        row_norms=(lambda name: norms_of_rows(parameters, name, clip.shape, 1e-6)) if has_qk_norm else None,
    )
    for index in range(clip.num_layers):
        theirs, own = f"encoder.layer.{index}", f"layers.{index}"
        LayerScale(
            parameters.names, f"{theirs}.lambda_1", f"{theirs}.attention.projection_layer", f"{own}.self_attn.o_proj"
        )
        LayerScale(parameters.names, f"{theirs}.lambda_2", f"{theirs}.mlp.fc2", f"{own}.mlp.fc2")
    merged_width = clip.width * side**2
    merged_norm = LayerNorm.new(parameters, "projector_norm", merged_width, _PROJECTOR_EPS)
    project = projector(parameters, config, merged_width, spec.width)
    config.reject_unread(spec.facts.architecture)
    has_last_norm = not optional(section, "use_mean_pooling", True)
    tower = InternTower(
        parameters,
        [clip.shape] * clip.num_layers,
        width=clip.width,
        patch_width=clip.patch_width,
        max_item_rows=clip.num_positions,
        embed=ClipEmbedding(parameters, clip, has_bias=True, has_norm=False),
        layers=layers,
        project=LayerNorm.new(parameters, "post_layernorm", clip.width, clip.eps) if has_last_norm else _unchanged,
        library=spec.library,
        merged=MergedProjection(side**2, lambda rows: project(merged_norm(rows))),
    )
    tower.clip, tower.side = clip, side
    return tower


def _norm(parameters: Parameters, clip: ClipConfig, kind: str) -> Callable[[str], Norm]:
    """Return a function that makes the norms before blocks.

    Raises:
        ConfigError: the norms are of an unknown kind.
    """
    match kind:
        case "layer_norm":
            return lambda name: LayerNorm.new(parameters, name, clip.width, clip.eps)
        case "rms_norm":
            return lambda name: RMSNorm.new(parameters, name, clip.width, clip.eps)
        case _:
            raise ConfigError(
                f"config.json: 'norm_type' of 'vision_config' is {kind!r}; expected layer_norm or rms_norm"
            )


def _flat_table(name: str, values: Values) -> Iterator[tuple[str, Values]]:
    """Reshape the position table to a matrix; it has one dimension too many."""
    is_table = isinstance(values, Tensor) and name == "position_embedding.weight" and values.ndim > 2
    yield name, values.flatten(0, 1) if is_table and isinstance(values, Tensor) else values


def _unchanged(rows: Tensor) -> Tensor:
    return rows
