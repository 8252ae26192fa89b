"""Media of simulated requests: whose items stand in the request's id, so that a worker knows what it should see.

An item is a letter, which decides the digest and the number of rows. Equal tokens stand at the positions of all items,
and the states after them differ. Rows of capital letters attend to each other in both directions. An item at position
`_ATTENDED` is attended to by all tokens, and the states of all positions differ.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from media_settings import media
from msgspec import structs

from octavo.protocol.buffers import Buffer
from octavo.protocol.config import CacheGroupSpec
from octavo.protocol.config.media import ResolvedMedia
from octavo.protocol.media import MediaItem, MediaTensor, StepMedia, digest_of
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit
from octavo.protocol.steps import Scheduled, StepPlan

SHARE = 0.25
"""Of the scenarios whose model reads media, as rows that attend as text does."""
SHARE_OF_OTHERS = 0.3
"""Of the other scenarios, whose model attends to an item beside the prompt, or has rows that attend both ways."""
_MARK, _END = "@", "~"
_NAMES = "abcdef"
_PLACEHOLDER = 7
_ATTENDED = -1
_ATTENDED_ROWS = 5


def _num_rows(name: str) -> int:
    return 1 + _NAMES.index(name.lower())


def draw_media(
    seed: int, engine: dict[str, Any], groups: Sequence[CacheGroupSpec]
) -> Callable[[Submit], Submit] | None:
    """Set the media of an engine, and return what gives them to a request; None: the engine reads text only."""
    rng = random.Random(f"media {seed}")
    if (settings := draw_settings(rng)) is not None:
        engine["media"] = settings
        return partial(with_media, rng=rng, names=_NAMES)
    rng = random.Random(f"other kinds of media {seed}")
    # A recurrent state has no rows to which an earlier position could attend.
    if rng.random() >= SHARE_OF_OTHERS or any(group.kind == "state" for group in groups):
        return None
    most = _num_rows(_NAMES[-1])
    budget = min(engine["max_num_batched_tokens"], rng.choice([most + 1, most + 4, 16, 512]))
    if rng.random() < 0.7 and budget > most and engine["long_prefill_token_threshold"] not in range(1, most):
        # A step has room for an item and one token of each request.
        engine["max_num_batched_tokens"] = budget
        engine["max_num_seqs"] = min(engine["max_num_seqs"], budget - most)
        engine["media"] = structs.replace(_settings(rng), max_num_encoder_tokens=rng.choice([most, 100]))
        return partial(with_media, rng=rng, names=_NAMES.upper())
    sizes = {"encoder_cache_tokens": _ATTENDED_ROWS * rng.choice([1, 2, 4]), "attended_rows": _ATTENDED_ROWS}
    engine["media"] = structs.replace(_settings(rng), limits={"image": 1}, **sizes)
    return partial(_with_attended, rng=rng)


def _tensors(name: str) -> dict[str, MediaTensor]:
    return {"pixels": MediaTensor("uint8", [1], Buffer(name.encode()))}


def draw_settings(rng: random.Random) -> ResolvedMedia | None:
    """Return the settings of the engine; None: it reads text only."""
    if rng.random() >= SHARE:
        return None
    return _settings(rng)


def _settings(rng: random.Random) -> ResolvedMedia:
    most = _num_rows(_NAMES[-1])
    return media(
        max_num_encoder_tokens=rng.choice([1, most, 2 * most, 100]),
        encoder_cache_tokens=rng.choice([most, most + 3, 20, 200]),
        max_item_tokens=most,
    )


def with_media(submit: Submit, rng: random.Random, names: str) -> Submit:
    """Return a request with some of the items in its prompt, if they fit and it may have some."""
    if not isinstance(submit.params, SamplingSpec) or submit.prompt_embeds is not None:
        return submit
    token_ids, items, named, position = list(submit.prompt_token_ids), [], [], rng.randint(0, 4)
    for name in rng.choices(names, k=rng.randint(0, 4)):
        end = position + _num_rows(name)
        if end > len(token_ids):
            break
        token_ids[position:end] = [_PLACEHOLDER] * (end - position)
        tensors = _tensors(name)
        spans = [(position, end - position)]
        items.append(MediaItem(spans, digest_of(tensors), tensors, is_both_ways=name.isupper()))
        named.append(f"{position}{name}")
        position = end + rng.randint(0, 6)
    ids = type(submit.prompt_token_ids)("I", token_ids)
    return structs.replace(submit, request_id=_named(submit.request_id, named), prompt_token_ids=ids, media=items)


def _with_attended(submit: Submit, rng: random.Random) -> Submit:
    """Return a request whose tokens all attend to an item, as each one of such a model must have."""
    name = rng.choice(_NAMES)
    tensors = _tensors(name)
    item = MediaItem([], digest_of(tensors), tensors, attended_rows=_ATTENDED_ROWS)
    request_id = _named(submit.request_id, [f"{_ATTENDED}{name}"])
    return structs.replace(submit, request_id=request_id, prompt_embeds=None, media=[item])


def _named(request_id: str, named: Sequence[str]) -> str:
    head, _, salt = request_id.partition(_END)
    return f"{head}{_MARK}{','.join(named)}{_END}{salt}" if named else request_id


def _items_of(request_id: str) -> list[tuple[int, str]]:
    """Return the first position and the name of each item."""
    named = request_id.partition(_END)[0].partition(_MARK)[2]
    return [(int(one[:-1]), one[-1]) for one in named.split(",") if one]


def seen(request_id: str, prompt_token_ids: Sequence[int]) -> list[int]:
    """Return what the model sees at the positions of a prompt: tokens, and rows of items."""
    found = list(prompt_token_ids)
    for position, name in _items_of(request_id):
        if position == _ATTENDED:
            found[0] += 1000 * _num_rows(name) + 500
            continue
        for row in range(_num_rows(name)):
            found[position + row] = 1000 * _num_rows(name) + row + 100 * name.isupper()
    return found


class SimulatedEncoder:
    """What a worker keeps of encoded items; checks every rule of `StepMedia`.

    Args:
        settings: settings of the engine; None: it reads text only.
    """

    def __init__(self, settings: ResolvedMedia | None) -> None:
        self._settings = settings
        self._kept: dict[bytes, str] = {}
        self._attended: dict[int, tuple[str, bytes]] = {}
        """By slot, the request and the digest of the item that it attends to."""

    def faults(self, step: StepPlan, ids: dict[int, str]) -> list[str]:
        """Apply the encoder's part of a plan; returns what is wrong with it.

        Args:
            step: whose media are encoded and read.
            ids: ids of the requests, by slot.
        """
        plan = step.media or StepMedia([], [], [], [])
        faults = [f"{digest.hex()} is evicted but not kept" for digest in plan.evicted if digest not in self._kept]
        for digest in plan.evicted:
            self._kept.pop(digest, None)
        for one in plan.inputs:
            name = bytes(one.tensors["pixels"].data.data).decode()
            is_same = one.digest == digest_of(one.tensors) and one.num_rows == self._num_kept_rows(name)
            if not is_same or one.digest in self._kept:
                faults.append(f"item {name} is encoded as another one, or again")
            self._kept[one.digest] = name
        faults += self._size_faults(plan)
        used = [self._kept.get(digest, "?") for digest in plan.digests]
        places = [(slot, at, count, used[index], first) for slot, at, count, index, first in plan.places]
        if sorted(_joined(places)) != (wanted := sorted(_wanted(step.scheduled, ids))):
            faults.append(f"the step has the rows {places} of media, not {wanted}")
        return faults + self._attended_faults(plan, step, ids) + _both_ways_faults(step, ids)

    def _attended_faults(self, plan: StepMedia, step: StepPlan, ids: dict[int, str]) -> list[str]:
        """Return the requests that attend to nothing, or to another item than their own."""
        self._attended |= {slot: (ids[slot], plan.digests[index]) for slot, index in plan.attended}
        faults = []
        for slot in {part.slot for part in step.scheduled}:
            wanted = [name for position, name in _items_of(ids[slot]) if position == _ATTENDED]
            request_id, digest = self._attended.get(slot, ("", b""))
            found = [self._kept.get(digest, "what is not kept")] if request_id == ids[slot] else []
            if found != wanted:
                faults.append(f"{ids[slot]} attends to {found}, not to {wanted}")
        return faults

    def _num_kept_rows(self, name: str) -> int:
        return (self._settings is not None and self._settings.attended_rows) or _num_rows(name)

    def _size_faults(self, plan: StepMedia) -> list[str]:
        if self._settings is None:
            return ["a model of text gets media"] if plan.inputs or plan.places else []
        num_encoded = sum([one.num_rows for one in plan.inputs])
        num_kept = sum(map(self._num_kept_rows, self._kept.values()))
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


def _both_ways_faults(step: StepPlan, ids: dict[int, str]) -> list[str]:
    """Return the items that a step leaves a part of, though the rows before attend to it."""
    faults = []
    for slot, request_id in ids.items():
        ends = {part.start + part.num_tokens for part in step.scheduled if part.slot == slot}
        spans = [(start, _num_rows(name)) for start, name in _items_of(request_id) if name.isupper()]
        if any(start < max(ends, default=0) < start + num_rows for start, num_rows in spans):
            faults.append(f"{request_id}: a step ends at {max(ends)}, within an item")
        told = [one.both_ways_spans for one in step.admitted if one.slot == slot]
        if told and told != [spans]:
            faults.append(f"{request_id}: rows attend both ways at {told}, not at {spans}")
    return faults


def _wanted(scheduled: Sequence[Scheduled], ids: dict[int, str]) -> list[Any]:
    """Return the rows that the parts of a step need: slot, first position, number, item, and first row of it."""
    return [
        (part.slot, begin, end - begin, name, begin - position)
        for part in scheduled
        for position, name in _items_of(ids[part.slot])
        if position != _ATTENDED
        if (begin := max(part.start, position)) < (end := min(part.start + part.num_tokens, position + _num_rows(name)))
    ]
