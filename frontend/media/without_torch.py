"""Loads processors of `transformers` without torch, and without their video part, which needs torchvision."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast


class NoVideos:
    """Replaces the class of every video processor."""

    @classmethod
    def from_pretrained(cls, *_args: Any, **_kwargs: Any) -> None:
        """Return `None` in place of a video processor."""


def leave_out_videos(assign: Callable[[Any, str, Any], None] = setattr) -> None:
    """Make all processors that this process loads omit their video part.

    Args:
        assign: replaces an attribute; tests undo it later.
    """
    from transformers import processing_utils
    from transformers.processing_utils import ProcessorMixin

    check = ProcessorMixin.check_argument_for_proper_class

    def check_if_given(self: ProcessorMixin, name: str, argument: Any) -> Any:
        return None if name == "video_processor" and argument is None else check(self, name, argument)

    assign(ProcessorMixin, "check_argument_for_proper_class", check_if_given)
    mapping = processing_utils.MODALITY_TO_AUTOPROCESSOR_MAPPING
    names = {**mapping._MAPPING_NAMES, "video_processor": (__name__, NoVideos.__name__)}
    assign(mapping, "_MAPPING_NAMES", names)


def leave_out_torch() -> None:
    """Make every import of torch in this process raise `ImportError`. Call it before `transformers` is imported.

    perf: with torch, importing `transformers` takes five times as long and five times the memory. Processors that do
    not need torchvision do not need torch either.
    """
    sys.modules["torch"] = cast(ModuleType, None)
