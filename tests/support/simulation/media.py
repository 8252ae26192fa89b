"""Media of simulated requests: whose items stand in the request's id, so that a worker knows what it should see.

An item is a letter, which decides the digest and the number of rows. Equal tokens stand at the positions of all items,
and the states after them differ.
"""

import random
from collections.abc import Sequence
from typing import Any

from media_settings import media
from msgspec import structs

from octavo.protocol.buffers import Buffer
from octavo.protocol.config.media import ResolvedMedia
from octavo.protocol.media import MediaItem, MediaTensor, StepMedia, digest_of
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit
from octavo.protocol.steps import Scheduled

SHARE = 0.25
"""Of the scenarios whose model reads media."""
_MARK, _END = "@", "~"
_NAMES = "abcdef"
_PLACEHOLDER = 7


def _num_rows(name: str) -> int:
    return 1 + _NAMES.index(name)


def _tensors(name: str) -> dict[str, MediaTensor]:
    return {"pixels": MediaTensor("uint8", [1], Buffer(name.encode()))}


def draw_settings(rng: random.Random) -> ResolvedMedia | None:
    """Return the settings of the engine; None: it reads text only."""
    if rng.random() >= SHARE:
        return None
    most = _num_rows(_NAMES[-1])
    return media(
        max_num_encoder_tokens=rng.choice([1, most, 2 * most, 100]),
        encoder_cache_tokens=rng.choice([most, most + 3, 20, 200]),
        max_item_tokens=most,
    )


def with_media(submit: Submit, rng: random.Random) -> Submit:
    """Return a request with items in its prompt, if they fit and it may have some."""
    if not isinstance(submit.params, SamplingSpec) or submit.prompt_embeds is not None:
        return submit
    token_ids, items, named, position = list(submit.prompt_token_ids), [], [], rng.randint(0, 4)
    for name in rng.choices(_NAMES, k=rng.randint(0, 4)):
        end = position + _num_rows(name)
        if end > len(token_ids):
            break
        token_ids[position:end] = [_PLACEHOLDER] * (end - position)
        tensors = _tensors(name)
        items.append(MediaItem([(position, end - position)], digest_of(tensors), tensors))
        named.append(f"{position}{name}")
        position = end + rng.randint(0, 6)
    head, _, salt = submit.request_id.partition(_END)
    request_id = f"{head}{_MARK}{','.join(named)}{_END}{salt}" if named else submit.request_id
    ids = type(submit.prompt_token_ids)("I", token_ids)
    return structs.replace(submit, request_id=request_id, prompt_token_ids=ids, media=items)


def _items_of(request_id: str) -> list[tuple[int, str]]:
    """Return the first position and the name of each item."""
    named = request_id.partition(_END)[0].partition(_MARK)[2]
    return [(int(one[:-1]), one[-1]) for one in named.split(",") if one]


def seen(request_id: str, prompt_token_ids: Sequence[int]) -> list[int]:
    """Return what the model sees at the positions of a prompt: tokens, and rows of items."""
    found = list(prompt_token_ids)
    for position, name in _items_of(request_id):
        for row in range(_num_rows(name)):
            found[position + row] = 1000 * (1 + _NAMES.index(name)) + row
    return found


class SimulatedEncoder:
    """What a worker keeps of encoded items; checks every rule of `StepMedia`.

    Args:
        settings: of the engine; None: it reads text only.
    """

    def __init__(self, settings: ResolvedMedia | None) -> None:
        self._settings = settings
        self._kept: dict[bytes, str] = {}

    def faults(self, plan: StepMedia | None, scheduled: Sequence[Scheduled], ids: dict[int, str]) -> list[str]:
        """Apply the encoder's part of a plan; returns what is wrong with it.

        Args:
            plan: of the step.
            scheduled: all parts of the step.
            ids: of the requests, by slot.
        """
        plan = plan or StepMedia([], [], [], [])
        faults = [f"{digest.hex()} is evicted but not kept" for digest in plan.evicted if digest not in self._kept]
        for digest in plan.evicted:
            self._kept.pop(digest, None)
        for one in plan.inputs:
            name = bytes(one.tensors["pixels"].data.data).decode()
            if one.digest != digest_of(one.tensors) or one.num_rows != _num_rows(name) or one.digest in self._kept:
                faults.append(f"item {name} is encoded as another one, or again")
            self._kept[one.digest] = name
        faults += self._size_faults(plan)
        used = [self._kept.get(digest, "?") for digest in plan.digests]
        places = [(slot, at, count, used[index], first) for slot, at, count, index, first in plan.places]
        if sorted(_joined(places)) != (wanted := sorted(_wanted(scheduled, ids))):
            faults.append(f"the step has the rows {places} of media, not {wanted}")
        return faults

    def _size_faults(self, plan: StepMedia) -> list[str]:
        if self._settings is None:
            return ["a model of text gets media"] if plan.inputs or plan.places else []
        num_encoded = sum([one.num_rows for one in plan.inputs])
        num_kept = sum(map(_num_rows, self._kept.values()))
        faults = []
        if len(plan.inputs) > 1 and num_encoded > self._settings.max_num_encoder_tokens:
            faults.append(f"a step encodes {num_encoded} rows")
        if num_kept > self._settings.encoder_cache_tokens:
            faults.append(f"{num_kept} rows are kept")
        return faults


def _joined(places: Sequence[Any]) -> list[Any]:
    """Return places of which none continues the one before it: a request may get several shares of a step."""
    found: list[Any] = []
    for place in sorted(places):
        slot, at, count, name, first = place
        if found and found[-1] == (slot, at - found[-1][2], found[-1][2], name, first - found[-1][2]):
            found[-1] = (slot, at - found[-1][2], found[-1][2] + count, name, first - found[-1][2])
        else:
            found.append(place)
    return found


def _wanted(scheduled: Sequence[Scheduled], ids: dict[int, str]) -> list[Any]:
    """Return the rows that the parts of a step need: slot, first position, number, item, and first row of it."""
    return [
        (part.slot, begin, end - begin, name, begin - position)
        for part in scheduled
        for position, name in _items_of(ids[part.slot])
        if (begin := max(part.start, position)) < (end := min(part.start + part.num_tokens, position + _num_rows(name)))
    ]
