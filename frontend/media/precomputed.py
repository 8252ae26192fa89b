"""Items of a request whose embedding rows the caller has computed: `image_embeds` and `audio_embeds`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.frontend.generation.tensors import is_dense
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.media import NUM_AXES

GRID = "image_grid_thw"
KEYS = {"image": "image_embeds", "audio": "audio_embeds"}
"""Key of the rows in message parts, and in objects of `multi_modal_data`."""
_MAX_NUMBERS = 2**16
"""Maximum number of values in all grids of an item; also the largest allowed value."""


@dataclass(frozen=True, slots=True, eq=False)
class PrecomputedRows:
    """An item as the caller has sent it."""

    rows: Any
    """A tensor of shape (rows, hidden size) or (1, rows, hidden size), or base64 of a file with one. `None`: its uuid
    is known."""
    grid: Any = None
    """Size (frames, height, width) in patches, as a list, a tensor or base64 of a file with one. `None`: there is
    no grid."""


def precomputed_part(value: Any, key: str, path: str) -> PrecomputedRows:
    """Return the item of a message part such as {"type": "image_embeds", "image_embeds": base64}.

    Args:
        value: value of the part's key.
        key: that key.
        path: path of the part in the request, for errors.

    Raises:
        InvalidRequestError: an object has keys other than the rows and their grid.
    """
    if not isinstance(value, Mapping):
        return PrecomputedRows(value)
    known = {key, GRID} if key == KEYS["image"] else {key}
    if (unknown := value.keys() - known) or value.get(key) is None:
        found = f"has {', '.join(sorted(unknown))}" if unknown else f"has no {key}"
        raise InvalidRequestError(f"{path}.{key} {found}; octavo knows {', '.join(sorted(known))}", path)
    return PrecomputedRows(value[key], value.get(GRID))


def precomputed_items(value: Any, kind: str, path: str, *, is_one: bool) -> Sequence[Any]:
    """Return the items of a value of `multi_modal_data`; tensors, and objects with rows, become `PrecomputedRows`.

    A tensor of shape (items, rows, hidden size) holds several items. So does a tensor of shape (rows, hidden size) with
    several grids.

    Args:
        value: one item, or several.
        kind: kind of the items.
        path: path of the items in the request, for errors.
        is_one: whether a value that is not a tensor is one item.

    Raises:
        InvalidRequestError: the rows cannot be divided among the grids, or an object has unknown keys.
    """
    if kind not in KEYS:
        return [value] if is_one else value
    if _has_rows(value):
        return _divided(value, kind, path) if isinstance(value, Mapping) else _divided({KEYS[kind]: value}, kind, path)
    several = [value] if is_one else value
    return [
        one if not _has_rows(one) else precomputed_part(one, KEYS[kind], f"{path}[{place}]")
        for place, one in enumerate(several)
    ]


def _has_rows(value: Any) -> bool:
    """Return whether a value has rows: a tensor that is not audio samples, or an object with such a tensor."""
    if isinstance(value, Mapping):
        return not value.keys().isdisjoint(KEYS.values())
    return hasattr(value, "layout") and hasattr(value, "detach") and value.ndim > 1


def _divided(value: Mapping[str, Any], kind: str, path: str) -> list[PrecomputedRows]:
    """Return the items that one tensor holds."""
    item = precomputed_part(value, KEYS[kind], path)
    rows = item.rows
    num_axes = rows.ndim if hasattr(rows, "layout") and is_dense(rows) else 0
    if item.grid is None or isinstance(item.grid, str):
        return [PrecomputedRows(one) for one in rows] if num_axes == 3 and item.grid is None else [item]
    numbers = whole_numbers(item.grid)
    grids = [numbers[at : at + NUM_AXES] for at in range(0, len(numbers), NUM_AXES)]
    if num_axes == 3 and len(grids) == len(rows):
        return [PrecomputedRows(one, grid) for one, grid in zip(rows, grids, strict=True)]
    if len(grids) == 1:
        return [PrecomputedRows(rows, grids[0])]
    sizes = [math.prod(grid) for grid in grids]
    lengths = [len(rows) * size // max(1, sum(sizes)) for size in sizes] if num_axes == 2 else []
    if num_axes != 2 or min(sizes, default=0) < 1 or sum(lengths) != len(rows):
        raise InvalidRequestError(
            f"{path}: the rows do not divide among the {len(grids)} grids ({GRID}): expected a tensor (rows, hidden "
            "size), or an object for each item",
            path,
        )
    return [PrecomputedRows(one, grid) for one, grid in zip(rows.split(lengths), grids, strict=True)]


def whole_numbers(grid: Any) -> list[int]:
    """Return the numbers of grids as a flat list.

    Raises:
        InvalidRequestError: the value is neither a list nor a dense tensor, has other numbers, or too many.
    """
    is_array = hasattr(grid, "tolist") and (not hasattr(grid, "layout") or is_dense(grid))
    listed = grid.flatten().tolist() if is_array and math.prod(grid.shape) <= _MAX_NUMBERS else grid
    rows = listed if isinstance(listed, list | tuple) else []
    flat = [number for one in rows for number in (one if isinstance(one, list | tuple) else [one])]
    if not 0 < len(flat) <= _MAX_NUMBERS or not all(type(one) is int and abs(one) <= _MAX_NUMBERS for one in flat):
        raise InvalidRequestError(
            f"{GRID} must be a list or a dense tensor of whole numbers: frames, height and width of an item", GRID
        )
    return flat
