"""Maps architectures to the files that implement their towers. Importing this module imports no model."""

from importlib import import_module

from octavo.protocol.errors import ConfigError
from octavo.protocol.media import Kind
from octavo.worker_proc.models.audio.item_encoder import ItemEncoder
from octavo.worker_proc.models.vision.tower import MediaTower, TowerSpec

AUDIO_ENCODERS = {
    "Phi4MultimodalForCausalLM": "phi4",
    "Qwen2AudioForConditionalGeneration": "qwen2_audio",
    "VoxtralForConditionalGeneration": "voxtral",
    "WhisperForConditionalGeneration": "whisper",
}
"""Modules of audio encoders in `octavo.worker_proc.models.audio`, by architecture."""
TOWERS = {
    "CLIPModel": "dual_encoder",
    "ColPaliForRetrieval": "paligemma",
    "ColQwen2ForRetrieval": "qwen_vl",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Idefics3ForConditionalGeneration": "idefics3",
    "InternVLForConditionalGeneration": "internvl",
    "Llama4ForConditionalGeneration": "llama4",
    "LlavaForConditionalGeneration": "llava",
    "LlavaNextForConditionalGeneration": "llava_next",
    "LlavaOnevisionForConditionalGeneration": "llava_next",
    "Mistral3ForConditionalGeneration": "pixtral",
    "Phi4MultimodalForCausalLM": "phi4",
    "Qwen2VLForConditionalGeneration": "qwen_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen25_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl",
    "SiglipModel": "dual_encoder",
    "SmolVLMForConditionalGeneration": "idefics3",
}
"""Modules of towers in `octavo.worker_proc.models.vision`, by architecture; a module's `build` makes the tower."""


def build_towers(spec: TowerSpec) -> dict[Kind, MediaTower | ItemEncoder]:
    """Make the towers of a model that reads media, by the kinds that they encode. Their parameters are uninitialized.

    Images and videos share a tower.

    Raises:
        ConfigError: the architecture, or something in its configuration, is not supported.
    """
    architecture, towers = spec.facts.architecture, dict[str, MediaTower | ItemEncoder]()
    found: dict[Kind, MediaTower | ItemEncoder] = {}
    for kind in spec.facts.token_ids:
        package, modules = ("audio", AUDIO_ENCODERS) if kind == "audio" else ("vision", TOWERS)
        if architecture not in modules:
            known = ", ".join(modules)
            raise ConfigError(f"octavo has no encoder of {architecture} for {kind}", hint=f"use one of {known}")
        if package not in towers:
            towers[package] = import_module(f"octavo.worker_proc.models.{package}.{modules[architecture]}").build(spec)
        found[kind] = towers[package]
    return found
