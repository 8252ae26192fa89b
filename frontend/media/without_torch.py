"""Loads processors of `transformers` without torch, and without their part for videos, which needs torchvision."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast


class NoVideos:
    """Stands for the class of every processor of videos."""

    @classmethod
    def from_pretrained(cls, *_args: Any, **_kwargs: Any) -> None:
        """Return None, in place of a processor of videos."""


def leave_out_videos(assign: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let all processors that this process loads be made without their part for videos.

    Args:
        assign: replaces an attribute; tests take it back later.
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
    """Let this process do without torch: whoever imports it gets an ImportError. Call it before `transformers` comes.

    perf: with torch, importing `transformers` takes five times as long and as much memory. Its processors that need no
    torchvision need no torch either.
    """
    sys.modules["torch"] = cast(ModuleType, None)
