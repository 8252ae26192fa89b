"""`mm_processor_kwargs` by kind of media."""

from typing import Any

import pytest

from octavo.protocol.media import Kind
from octavo.protocol.media_kwargs import kwargs_fault, kwargs_of

KINDS: tuple[Kind, ...] = ("image", "video")
GIVEN = {"max_pixels": 9, "fps": 2, "images_kwargs": {"size": 1}, "videos_kwargs": {"num_frames": 3}}


def test_arguments_of_each_kind() -> None:
    assert not kwargs_fault(GIVEN, KINDS)
    assert kwargs_of(GIVEN, "image", KINDS) == {"max_pixels": 9, "size": 1}
    assert kwargs_of(GIVEN, "video", KINDS) == {"max_pixels": 9, "fps": 2, "num_frames": 3}
    assert kwargs_of({"fps": 2}, "image", ["image"]) == {"fps": 2}, "the processor of images refuses it"


@pytest.mark.parametrize(
    ("kwargs", "fault"),
    [
        ({"videos_kwargs": 3}, "videos_kwargs is 3; expected an object"),
        ({"audio_kwargs": {"a": 1}}, "it has audio_kwargs, and the model reads media of kind image and video"),
        ({"a": 1, "b": 2, "images_kwargs": {"b": 2, "c": 3}}, "b is in images_kwargs and beside it"),
    ],
)
def test_what_is_refused(kwargs: dict[str, Any], fault: str) -> None:
    assert fault in kwargs_fault(kwargs, KINDS)
