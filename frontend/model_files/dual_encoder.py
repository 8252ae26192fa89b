"""`CLIPModel` and `SiglipModel`: splits `config.json` into the text model's part and the facts of the images."""

from pathlib import Path
from typing import Any

from octavo.protocol.config import ModelConfig
from octavo.protocol.config.facts import MediaFacts
from octavo.protocol.errors import ConfigError

DUAL_ENCODERS = ("CLIPModel", "SiglipModel")

_CLIP_TEXT: dict[str, Any] = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_SIGLIP_TEXT: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
"""Values that `transformers` omits from files."""
_OF_ALL = ("dtype", "torch_dtype")
_NOT_OF_TEXT = {"projection_dim", "projection_size", "architectures"}


def split_dual_encoder(
    hf_config: dict[str, Any], architecture: str, home: Path, config: ModelConfig
) -> tuple[dict[str, Any], MediaFacts]:
    """Return the configuration of the text model, and the facts of its images.

    Raises:
        ConfigError: a section or a size is missing, or a setting does not apply to such a model.
    """
    if config.model_impl == "transformers":
        raise ConfigError(f"--model-impl transformers: {architecture} reads images", hint="leave it out")
    is_clip = architecture == "CLIPModel"
    text, vision = (_section(hf_config, name) for name in ("text_config", "vision_config"))
    own = {**(_CLIP_TEXT if is_clip else _SIGLIP_TEXT), **text}
    width = hf_config.get("projection_dim", 512) if is_clip else text.get("projection_size", own["hidden_size"])
    vision_width = width if is_clip else vision.get("hidden_size", 768)
    if type(width) is not int or width < 1 or width != vision_width:
        raise ConfigError(f"config.json: vectors of texts have {width!r} numbers, and those of images {vision_width!r}")
    size, patch_size = vision.get("image_size", 224), vision.get("patch_size", 32 if is_clip else 16)
    if not all(type(one) is int and one > 0 for one in (size, patch_size)):
        raise ConfigError("config.json: image_size and patch_size must be positive integers")
    own = {key: value for key, value in own.items() if key not in _NOT_OF_TEXT}
    own |= {key: hf_config[key] for key in _OF_ALL if hf_config.get(key) is not None}
    own |= {"projection_dim": width, "has_projection_bias": not is_clip}
    media = MediaFacts(
        architecture=architecture,
        hf_config={**hf_config, "vision_config": vision},
        token_ids={"image": 0},  # any token: its hidden state is not read
        processor_path=str(home),
        vector_width=width,
        vector_patches=(size // patch_size) ** 2 + is_clip,
    )
    return own, media


def _section(hf_config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a section without nulls; older CLIP files have parts of it in `text_config_dict` and similar keys."""
    section, older = hf_config.get(name) or {}, hf_config.get(f"{name}_dict") or {}
    if not isinstance(section, dict) or not isinstance(older, dict):
        raise ConfigError(f"config.json: {name} is not an object")
    return {key: value for key, value in {**section, **older}.items() if value is not None}
