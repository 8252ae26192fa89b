"""LLaVA-1.5: a CLIP or SigLIP tower; each patch becomes a prompt row through two linear layers."""

from collections.abc import Mapping
from typing import Any, TypeVar

from octavo.protocol.errors import ConfigError, ProtocolError
from octavo.protocol.media import MediaTensor
from octavo.worker_proc.models.checkpoint import renamed
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional, reject_unless
from octavo.worker_proc.models.layers.activation import PLAIN, activation
from octavo.worker_proc.models.layers.mlp import Mlp
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.vision import pixtral
from octavo.worker_proc.models.vision.clip import (
    CLIP_DEFAULTS,
    SIGLIP_DEFAULTS,
    ClipConfig,
    ClipEmbedding,
    SiglipEmbedding,
    clip_ignored,
    clip_layers,
    clip_rules,
)
from octavo.worker_proc.models.vision.tower import MediaTower, Patches, TowerSpec, pixels_of

PREFIXES = [
    *(f"{outer}{inner}." for outer in ("", "model.") for inner in ("vision_tower.vision_model", "vision_tower")),
    *(f"{outer}multi_modal_projector." for outer in ("", "model.")),
    "model.",
]
PROJECTOR_NAMES = {r"^linear_([12])\.": r"projector.fc\1."}
READ_ELSEWHERE = (
    *("text_config", "vision_config", "image_token_index", "image_token_id", "image_seq_length", "ignore_index"),
    *("tie_word_embeddings", "video_token_index", "video_token_id", "use_image_newline_parameter"),
)


class LlavaTower(MediaTower):
    """The tower with its projector."""

    clip: ClipConfig
    first: int
    """First position whose result is a prompt row; 1 leaves out the class token."""

    def patches(self, tensors: Mapping[str, MediaTensor]) -> list[Patches]:
        """See `MediaTower.patches`."""
        (pixels_CHW, *others) = pixels_of(tensors, "pixel_values", 4)
        if others:
            raise ProtocolError(f"{1 + len(others)} pictures in place of one")
        return [self.clip.sequence(pixels_CHW, first=self.first)]


Tower = TypeVar("Tower", bound=LlavaTower)


def assemble(kind: type[Tower], spec: TowerSpec, config: CheckedConfig, layer: int = -2) -> Tower:
    """Make a tower of this family; its parameters are uninitialized.

    Args:
        kind: class of the tower.
        spec: what the model is built for.
        config: model configuration; the caller rejects keys that were not read.
        layer: layer whose results are read, in the form of `vision_feature_layer`, if `config` does not say.

    Raises:
        ConfigError: something in the configuration is not supported.
    """
    ignore(config, *READ_ELSEWHERE)
    clip = _clip_config(config["vision_config"], spec.facts.architecture)
    strategies = ["default", "full"] if clip.has_class_token else ["full"]
    reject_unless(config, "vision_feature_select_strategy", [*strategies, None])
    layer = optional(config, "vision_feature_layer", layer)
    if type(layer) is not int or not -clip.num_layers <= layer <= clip.num_layers or layer == 0:
        raise ConfigError(f"config.json: 'vision_feature_layer' is {layer!r}; expected the number of one layer")
    num_layers = layer if layer > 0 else clip.num_layers + 1 + layer
    parameters = Parameters(
        spec.placement,
        prefixes=PREFIXES,
        ignored=[r"^head\.", *clip_ignored(num_layers, clip.num_layers)],
        rules=[*clip_rules(), renamed(PROJECTOR_NAMES)],
    )
    tower = kind(
        parameters,
        [clip.shape] * num_layers,
        width=clip.width,
        patch_width=clip.patch_width,
        max_item_rows=clip.num_positions,
        embed=(ClipEmbedding if clip.has_class_token else SiglipEmbedding)(parameters, clip),
        layers=clip_layers(parameters, clip, num_layers),
        project=projector(parameters, config, clip.width, spec.width),
        library=spec.library,
    )
    tower.clip = clip
    tower.first = int((config.get("vision_feature_select_strategy") or strategies[0]) == "default")
    return tower


def projector(parameters: Parameters, config: CheckedConfig, width: int, num_outputs: int) -> Mlp:
    """Make two linear layers, `linear_1` and `linear_2` in checkpoints.

    Raises:
        ConfigError: an activation is not supported.
    """
    return Mlp(
        parameters,
        "projector",
        width,
        num_outputs,
        num_outputs=num_outputs,
        activation=activation(config, "gelu", PLAIN, key="projector_hidden_act"),
        has_bias=optional(config, "multimodal_projector_bias", True),
    )


def _clip_config(section: Mapping[str, Any], architecture: str) -> ClipConfig:
    match section.get("model_type"):
        case "clip_vision_model" | "clip_vision":
            return ClipConfig.read(section, CLIP_DEFAULTS, unused=["vocab_size"])
        case "siglip_vision_model":
            return ClipConfig.read(section, SIGLIP_DEFAULTS, has_class_token=False, unused=["vocab_size"])
        case kind:
            raise ConfigError(
                f"config.json: {architecture} with a vision tower of type {kind!r}",
                hint="the tower must be a clip_vision_model, a siglip_vision_model, or pixtral in LLaVA-1.5's form",
            )


def build(spec: TowerSpec) -> MediaTower:
    """Make the tower; its parameters are uninitialized.

    Raises:
        ConfigError: something in the configuration is not supported.
    """
    config = CheckedConfig(spec.facts.hf_config)
    if config["vision_config"].get("model_type") == "pixtral":
        return pixtral.build(spec)
    ignore(config, "image_grid_pinpoints")
    tower = assemble(LlavaTower, spec, config)
    config.reject_unread(spec.facts.architecture)
    return tower
