"""Reads `multi_modal_data` of callers: the items of each kind, and their uuids."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from octavo.frontend.media.kinds import KINDS
from octavo.frontend.media.parts import NOUNS, MediaSource
from octavo.frontend.media.precomputed import precomputed_items
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.media import Kind

FIELD, UUIDS, KWARGS = "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"


def kinds_of(sources: Iterable[MediaSource]) -> list[Kind]:
    """Return the kinds of the items, without duplicates."""
    return list(dict.fromkeys([source.kind for source in sources]))


def by_kind(sources: Sequence[MediaSource]) -> dict[Kind, list[MediaSource]]:
    """Return the items of a conversation by kind, as in `multi_modal_data`."""
    return {kind: [source for source in sources if source.kind == kind] for kind in kinds_of(sources)}


def sources_of(data: Any, uuids: Any, kinds: Collection[Kind]) -> list[MediaSource]:
    """Return the items of `multi_modal_data`: {"image": picture}, {"image": [picture, ...], "video": clip}, ...

    Args:
        data: data of the caller.
        uuids: {"image": uuid} or {"image": [uuid, None, ...]}, one for each item. An item with a uuid may be `None`.
        kinds: that the model reads.

    Raises:
        InvalidRequestError: the value has another form, or a kind that the model does not read.
    """
    given = {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else None
    if given is None or given.keys() - set(kinds):
        found = type(data).__name__ if given is None else sorted(given)
        known = ", ".join([f"{kind!r}: {NOUNS[kind]}" for kind in kinds])
        raise InvalidRequestError(f"{FIELD} has {found}; this model takes {{{known}}}", FIELD)
    names = _uuids_by_kind(uuids, given, kinds)
    sources: list[MediaSource] = []
    for kind in kinds:
        if kind not in given and kind not in names:
            continue
        items: Any = given.get(kind)
        several = precomputed_items(items, kind, f"{FIELD}[{kind!r}]", is_one=KINDS[kind].is_one(items))
        sources += [
            item if isinstance(item, MediaSource) else MediaSource(kind, item, f"{FIELD}[{kind!r}][{place}]", name)
            for place, (item, name) in enumerate(zip(several, _uuids(names, len(several), kind), strict=True))
        ]
    return sources


def _uuids_by_kind(uuids: Any, given: Collection[str], kinds: Collection[Kind]) -> dict[str, Any]:
    """Return uuids by kind. Uuids without a kind are allowed if there is only one kind.

    Raises:
        InvalidRequestError: a kind is unknown, or uuids without a kind come with items of several kinds.
    """
    if not isinstance(uuids, dict):
        named = given or kinds
        if uuids is not None and len(named) != 1:
            raise InvalidRequestError(f"{UUIDS} is {uuids!r}; expected uuids by kind: {sorted(named)}", UUIDS)
        return {} if uuids is None else dict.fromkeys(named, uuids)
    if uuids.keys() - set(kinds):
        raise InvalidRequestError(f"{UUIDS} has {sorted(uuids)}; this model reads {', '.join(kinds)}", UUIDS)
    return uuids


def _uuids(uuids: dict[str, Any], num_items: int, kind: Kind) -> Sequence[str | None]:
    """Return the uuid of each item.

    Raises:
        InvalidRequestError: the uuids are not strings, or their number is wrong.
    """
    if (given := uuids.get(kind)) is None:
        return [None] * num_items
    several = given if isinstance(given, list | tuple) else [given]
    if len(several) != num_items or any(one is not None and not (isinstance(one, str) and one) for one in several):
        raise InvalidRequestError(
            f"{UUIDS} is {given!r}; expected {{{kind!r}: [uuid, ...]}}, a string or None for each of "
            f"{num_items} {NOUNS[kind]}s",
            UUIDS,
        )
    return several
