"""Which file implements the tower of which architecture. Importing it imports no model."""

from importlib import import_module

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.vision.tower import TowerSpec, VisionTower

_AUDIO = {
    "Qwen2AudioForConditionalGeneration": "qwen2_audio",
    "VoxtralForConditionalGeneration": "voxtral",
    "WhisperForConditionalGeneration": "whisper",
}
"""The same for `octavo.worker_proc.models.audio`."""
TOWERS = {
    "CLIPModel": "dual_encoder",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Idefics3ForConditionalGeneration": "idefics3",
    "InternVLForConditionalGeneration": "internvl",
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
"""The module in `octavo.worker_proc.models.vision` by architecture; its `build` makes the tower."""


def build_tower(spec: TowerSpec) -> VisionTower:
    """Make the tower of a model that reads images or audio. Its parameters are uninitialized.

    Raises:
        ConfigError: the architecture, or something in its configuration, is not supported.
    """
    architecture = spec.facts.architecture
    package, name = "vision", TOWERS.get(architecture)
    if name is None:
        package, name = "audio", _AUDIO.get(architecture)
    if name is None:
        known = ", ".join([*TOWERS, *_AUDIO])
        raise ConfigError(f"octavo has no encoder of {architecture}", hint=f"use one of {known}")
    build = import_module(f"octavo.worker_proc.models.{package}.{name}").build
    tower: VisionTower = build(spec)
    return tower
