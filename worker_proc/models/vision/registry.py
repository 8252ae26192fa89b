"""Which file implements the tower of which architecture. Importing it imports no model."""

from importlib import import_module

from octavo.kernels.native.library import NativeLibrary
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.vision.tower import VisionTower
from octavo.worker_proc.parallel.placement import Placement

TOWERS = {
    "Idefics3ForConditionalGeneration": "idefics3",
    "LlavaForConditionalGeneration": "llava",
    "SmolVLMForConditionalGeneration": "idefics3",
}
"""The module in `octavo.worker_proc.models.vision` by architecture; its `build` makes the tower."""


def build_tower(facts: ModelFacts, placement: Placement, library: NativeLibrary | None) -> VisionTower:
    """Make the tower of a model that reads images. Its parameters are uninitialized.

    Raises:
        ConfigError: the architecture, or something in its configuration, is not supported.
    """
    assert facts.media is not None, "a model that reads images"
    if (name := TOWERS.get(facts.media.architecture)) is None:
        raise ConfigError(
            f"octavo has no vision tower of {facts.media.architecture}", hint=f"use one of {', '.join(TOWERS)}"
        )
    build = import_module(f"octavo.worker_proc.models.vision.{name}").build
    tower: VisionTower = build(facts.media, facts.embedding_width, placement, library)
    return tower
