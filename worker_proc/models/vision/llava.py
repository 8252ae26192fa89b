"""LLaVA-1.5: the patches of a CLIP tower, each through two linear layers, are rows of the prompt."""

from collections.abc import Mapping

from octavo.protocol.errors import ConfigError
from octavo.protocol.media import MediaTensor
from octavo.worker_proc.models.checkpoint import renamed
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional, reject_unless
from octavo.worker_proc.models.layers.activation import PLAIN, activation
from octavo.worker_proc.models.layers.mlp import Mlp
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.vision.clip import (
    CLIP_DEFAULTS,
    ClipConfig,
    ClipEmbedding,
    clip_ignored,
    clip_layers,
    clip_rules,
)
from octavo.worker_proc.models.vision.tower import Patches, TowerSpec, VisionTower

_TOWER, _PROJECTOR = "vision_tower.", "multi_modal_projector."
_READ_ELSEWHERE = (
    *("text_config", "vision_config", "image_token_index", "image_token_id", "image_seq_length"),
    *("ignore_index", "tie_word_embeddings", "image_grid_pinpoints"),
)


class LlavaTower(VisionTower):
    """The tower with its projector."""

    clip: ClipConfig
    has_class: bool
    """Whether the class token is a row of the prompt too."""

    def patches(self, tensors: Mapping[str, MediaTensor]) -> list[Patches]:
        """See `VisionTower.patches`."""
        return self.clip.patches(tensors, has_class=self.has_class)


def build(spec: TowerSpec) -> LlavaTower:
    """Make the tower; its parameters are uninitialized.

    Raises:
        ConfigError: something in the configuration is not supported.
    """
    config = CheckedConfig(spec.facts.hf_config)
    ignore(config, *_READ_ELSEWHERE)
    section = config["vision_config"]
    if section.get("model_type") not in ("clip_vision_model", "clip_vision"):
        raise ConfigError(
            f"config.json: {spec.facts.architecture} with a vision tower of type {section.get('model_type')!r}",
            hint="the tower must be a clip_vision_model",
        )
    clip = ClipConfig.read(section, CLIP_DEFAULTS)
    layer = config.get("vision_feature_layer", -2)
    if type(layer) is not int or not -clip.num_layers <= layer <= clip.num_layers or layer == 0:
        raise ConfigError(f"config.json: 'vision_feature_layer' is {layer!r}; expected the number of one layer")
    num_layers = layer if layer > 0 else clip.num_layers + 1 + layer
    reject_unless(config, "vision_feature_select_strategy", ["default", "full", None])
    names = {r"^linear_([12])\.": r"projector.fc\1."}
    prefixes = [
        f"{outer}{inner}" for outer in ("", "model.") for inner in (f"{_TOWER}vision_model.", _TOWER, _PROJECTOR)
    ]
    parameters = Parameters(
        spec.placement,
        prefixes=prefixes,
        ignored=clip_ignored(num_layers, clip.num_layers),
        rules=[*clip_rules(), renamed(names)],
    )
    projector = Mlp(
        parameters,
        "projector",
        clip.width,
        spec.width,
        num_outputs=spec.width,
        activation=activation(config, "gelu", PLAIN, key="projector_hidden_act"),
        has_bias=optional(config, "multimodal_projector_bias", True),
    )
    tower = LlavaTower(
        parameters,
        [clip.shape] * num_layers,
        width=clip.width,
        patch_width=clip.patch_width,
        max_item_rows=clip.num_positions,
        embed=ClipEmbedding(parameters, clip),
        layers=clip_layers(parameters, clip, num_layers),
        project=projector,
        library=spec.library,
    )
    tower.clip = clip
    tower.has_class = config.get("vision_feature_select_strategy") == "full"
    config.reject_unread(spec.facts.architecture)
    return tower
