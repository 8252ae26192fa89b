"""`mm_processor_kwargs` by kind of media, with the names of `transformers`: {"videos_kwargs": {"fps": 2}}."""

from collections.abc import Collection, Mapping
from typing import Any

from octavo.protocol.media import Kind

BY_KIND: dict[Kind, str] = {"image": "images_kwargs", "video": "videos_kwargs", "audio": "audio_kwargs"}
"""The key of arguments for one kind only. Other arguments are for all kinds."""
SAMPLING = ("num_frames", "fps")
"""Arguments outside of these keys that only concern videos, whatever else a model reads."""


def kwargs_fault(kwargs: Mapping[str, Any], kinds: Collection[Kind]) -> str:
    """Return why these cannot be arguments of processors. Return "" if they can, provided the processors know them.

    `kinds`: the kinds that the model reads.
    """
    for kind, name in BY_KIND.items():
        if (own := kwargs.get(name)) is None:
            continue
        if not isinstance(own, Mapping):
            return f"{name} is {own!r}; expected an object with arguments"
        if kind not in kinds:
            return f"it has {name}, and the model reads media of kind {' and '.join(kinds)}"
        if twice := own.keys() & kwargs.keys():
            return f"{', '.join(sorted(twice))} is in {name} and beside it: leave one out"
    return ""


def kwargs_of(kwargs: Mapping[str, Any], kind: Kind, kinds: Collection[Kind]) -> dict[str, Any]:
    """Return the arguments for a kind: its own and those for all kinds.

    Args:
        kwargs: arguments without a `kwargs_fault`.
        kind: kind of media.
        kinds: the kinds that the model reads.
    """
    skipped = {*BY_KIND.values(), *(SAMPLING if kind != "video" and "video" in kinds else ())}
    for_all = {name: value for name, value in kwargs.items() if name not in skipped}
    return {**for_all, **(kwargs.get(BY_KIND[kind]) or {})}
