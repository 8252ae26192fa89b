"""ColPali: the patches of a SigLIP tower, each through one linear layer, are rows of PaliGemma's prompts."""

from octavo.worker_proc.models.hf_config import CheckedConfig, ignore
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.vision.clip import SIGLIP_DEFAULTS, ClipConfig, SiglipEmbedding, clip_layers, clip_rules
from octavo.worker_proc.models.vision.llava import PREFIXES, LlavaTower
from octavo.worker_proc.models.vision.tower import TowerSpec

_DEFAULTS = {
    **SIGLIP_DEFAULTS,
    "hidden_size": 1152,
    "intermediate_size": 4096,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
}
_READ_ELSEWHERE = (
    *("text_config", "vision_config", "image_token_index", "image_token_id", "projection_dim", "hidden_size"),
    *("tie_word_embeddings", "ignore_index", "num_hidden_layers"),
)


def build(spec: TowerSpec) -> LlavaTower:
    """Make the tower; its parameters are uninitialized.

    Raises:
        ConfigError: something in the configuration is not supported.
    """
    config = CheckedConfig(spec.facts.hf_config)
    ignore(config, *_READ_ELSEWHERE)
    unused = ("vocab_size", "num_image_tokens", "projector_hidden_act", "num_positions")
    clip = ClipConfig.read(config["vision_config"], _DEFAULTS, has_class_token=False, unused=unused)
    config.reject_unread(spec.facts.architecture)
    prefixes = [f"vlm.{prefix}" for prefix in PREFIXES]
    parameters = Parameters(
        spec.placement, prefixes=prefixes, ignored=[r"^head\.", r"position_ids$"], rules=clip_rules()
    )
    last_norm = LayerNorm.new(parameters, "post_layernorm", clip.width, clip.eps)
    linear = Linear.new(parameters, "linear", clip.width, spec.width, bias=True)
    tower = LlavaTower(
        parameters,
        [clip.shape] * clip.num_layers,
        width=clip.width,
        patch_width=clip.patch_width,
        max_item_rows=clip.num_positions,
        embed=SiglipEmbedding(parameters, clip),
        layers=clip_layers(parameters, clip, clip.num_layers),
        project=lambda rows: linear(last_norm(rows)),
        library=spec.library,
    )
    tower.clip, tower.first = clip, 0
    return tower
