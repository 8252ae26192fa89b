"""`MediaPrompts`: prompts with images or sounds, from text or tokens and the media to tokens and `MediaItem`s."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol

import msgspec

from octavo.frontend.media.download import MediaError, read_url
from octavo.frontend.media.kinds import KINDS
from octavo.frontend.media.live_bytes import LiveBuffer, LiveMedia
from octavo.frontend.media.parts import NOUNS, Kind, MediaOptions, MediaSource, first_media_path, take_media
from octavo.frontend.media.processor import MediaProcessor, name_of
from octavo.frontend.media.wire import Result
from octavo.frontend.text.messages import Message
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.media import MAX_ITEM_BYTES, MediaItem, MediaTensor
from octavo.protocol.prompt_embeds import Span

FIELD, UUIDS, KWARGS = "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"

Encode = Callable[..., Awaitable[list[int]]]
_NO_OPTIONS = MediaOptions()


@dataclass(frozen=True, slots=True, eq=False)
class MediaPrompt:
    """A prompt with media."""

    token_ids: list[int]
    """With a placeholder for each row."""
    items: tuple[MediaItem, ...]
    duration_s: float = 0.0
    """Of all its sounds together."""


class PromptMaker(Protocol):
    """Makes the prompts of a model with media."""

    kind: Kind
    """What it reads."""

    async def take(self, messages: Sequence[Message]) -> tuple[list[Message], list[MediaSource]]:
        """Return a conversation with marks in place of its media, and the media."""

    async def of_text(
        self,
        text: str,
        sources: Sequence[MediaSource],
        *,
        adds_special_tokens: bool,
        options: MediaOptions = _NO_OPTIONS,
    ) -> MediaPrompt:
        """Return the prompt of a text with media."""

    async def of_tokens(
        self, token_ids: Sequence[int], sources: Sequence[MediaSource], options: MediaOptions = _NO_OPTIONS
    ) -> MediaPrompt:
        """Return the prompt of tokens with media."""

    async def close(self) -> None:
        """End the processes that decode media."""


class MediaPrompts:
    """Makes the prompts of a model whose media are rows of prompts. Belongs to one event loop.

    Args:
        config: of the engine.
        encode: tokenizes: see `AsyncClient.tokenize`.
        on_query: see `MediaProcessor`.
    """

    def __init__(
        self, config: ResolvedConfig, encode: Encode, on_query: Callable[[bool], None] = lambda is_hit: None
    ) -> None:
        assert config.media is not None and config.model.media is not None, "a model that reads media"
        self._media, self.kind = config.media, config.model.media.kind
        assert config.model.media.token_id is not None, "a model whose media are rows of prompts"
        self._token_id = config.model.media.token_id
        self._is_both_ways = config.model.media.both_ways_rows > 0
        self._encode = encode
        self.processor = MediaProcessor(config, on_query)
        self._live = LiveMedia(config.media.max_live_bytes)

    async def take(self, messages: Sequence[Message]) -> tuple[list[Message], list[MediaSource]]:
        """Return a conversation with marks in place of its media, and the media.

        Raises:
            InvalidRequestError: an item has no URL, or is of another kind.
        """
        if first_media_path(messages) is None:  # needs no process that decodes any
            return list(messages), []
        return take_media(messages, self.kind, await self.processor.placeholder())

    async def of_text(
        self,
        text: str,
        sources: Sequence[MediaSource],
        *,
        adds_special_tokens: bool,
        options: MediaOptions = _NO_OPTIONS,
    ) -> MediaPrompt:
        """Return the prompt of a text that has a placeholder for each item.

        Raises:
            InvalidRequestError: an item cannot be used, or their number is another one.
            OverloadedError: live requests hold as much as they may.
        """
        results = await self._process_all(sources, options)
        pieces = text.split(await self.processor.placeholder())
        self._check_count(len(pieces) - 1, sources)
        replaced = [one.replacement for one in results]
        expanded = "".join(chain.from_iterable(zip(pieces, [*replaced, ""], strict=True)))
        return self._prompt(await self._encode(expanded, add_special_tokens=adds_special_tokens), results, sources)

    async def of_tokens(
        self, token_ids: Sequence[int], sources: Sequence[MediaSource], options: MediaOptions = _NO_OPTIONS
    ) -> MediaPrompt:
        """Return the prompt of tokens that have one placeholder for each item; raises as `of_text`."""
        results = await self._process_all(sources, options)
        placeholder_id = await self.processor.placeholder_id()
        self._check_count(list(token_ids).count(placeholder_id), sources)
        remaining, expanded = iter(results), list[int]()
        for token_id in token_ids:
            expanded += next(remaining).token_ids if token_id == placeholder_id else [token_id]
        return self._prompt(expanded, results, sources)

    async def close(self) -> None:
        """End the processes that decode media."""
        await self.processor.close()

    async def _process_all(self, sources: Sequence[MediaSource], options: MediaOptions) -> list[Result]:
        limit = self._media.limits[self.kind]
        if len(sources) > limit:
            raise InvalidRequestError(
                f"the prompt has {len(sources)} {NOUNS[self.kind]}s, and the limit is {limit} (--limit-mm-per-prompt)",
                sources[limit].path,
            )
        tasks = [asyncio.ensure_future(self._process(source, options)) for source in sources]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _process(self, source: MediaSource, options: MediaOptions) -> Result:
        """Return what the processor makes of an item.

        Raises:
            InvalidRequestError: it cannot be used; the message names it.
        """
        try:
            if source.uuid is None:
                return await self.processor.process(await self._read(source.value, options))
            return await self._process_named(source, source.uuid, options)
        except MediaError as error:
            raise InvalidRequestError(
                f"{source.path}: the {NOUNS[self.kind]} cannot be used: {error}", source.path
            ) from None

    async def _process_named(self, source: MediaSource, uuid: str, options: MediaOptions) -> Result:
        """Return what the processor makes of an item with a uuid. A known one is not read again."""
        name = name_of(uuid, options)
        if (known := self.processor.known(name)) is not None:
            return known
        if source.value is None:
            noun = NOUNS[self.kind]
            raise MediaError(f"the server has no {noun} with the uuid {uuid!r} any more: send the {noun} with it")
        return await self.processor.process(await self._read(source.value, options), name)

    async def _read(self, value: Any, options: MediaOptions) -> msgspec.Struct:
        """Return an item as `MediaProcessor.process` takes it."""
        if isinstance(value, str):
            try:
                async with asyncio.timeout(self._media.fetch_timeout_s + 1.0):  # resolving a name has no limit
                    value = await asyncio.to_thread(read_url, value, self._media)
            except TimeoutError:
                raise MediaError("the download takes too long (--media-fetch-timeout)") from None
        return await asyncio.to_thread(KINDS[self.kind].job, value, options.processor_kwargs, self._media)

    def _check_count(self, num_placeholders: int, sources: Sequence[MediaSource]) -> None:
        if num_placeholders != len(sources):
            noun = NOUNS[self.kind]
            raise InvalidRequestError(
                f"the prompt has {num_placeholders} placeholders of {noun}s for {len(sources)} {noun}s: each {noun} "
                "needs one, and no text may contain it",
                sources[0].path if sources else FIELD,
            )

    def _prompt(self, token_ids: list[int], results: Sequence[Result], sources: Sequence[MediaSource]) -> MediaPrompt:
        """Return the prompt, whose placeholders are the rows of the items in order."""
        places = iter([place for place, token_id in enumerate(token_ids) if token_id == self._token_id])
        items = []
        for result, source in zip(results, sources, strict=True):
            if result.num_rows > self._media.max_item_tokens:
                raise InvalidRequestError(
                    f"{source.path}: the {NOUNS[self.kind]} has {result.num_rows} tokens, and the limit is "
                    f"{self._media.max_item_tokens}: send a smaller one (--max-num-encoder-tokens and "
                    "--encoder-cache-tokens limit it)",
                    source.path,
                )
            tensors = {
                name: MediaTensor(dtype, shape, LiveBuffer(data))
                for name, (dtype, shape, data) in result.tensors.items()
            }
            own = list(islice(places, result.num_rows))
            if len(own) < result.num_rows:
                raise InvalidRequestError(
                    f"the prompt has fewer placeholders than rows of media: the model's tokenizer does not make token "
                    f"{self._token_id}, which config.json names, of each",
                    FIELD,
                )
            item = MediaItem(_spans(own), result.digest, tensors, result.grid, is_both_ways=self._is_both_ways)
            if item.num_bytes > MAX_ITEM_BYTES:
                raise InvalidRequestError(
                    f"{source.path}: the processed {NOUNS[self.kind]} has more than {MAX_ITEM_BYTES} bytes", source.path
                )
            items.append(item)
        if next(places, None) is not None:
            raise InvalidRequestError("the prompt has more placeholders than rows of media", FIELD)
        self._live.hold_prompt(items, FIELD)
        return MediaPrompt(token_ids, tuple(items), sum([result.duration_s for result in results]))


def sources_of(data: Any, uuids: Any, kind: Kind) -> list[MediaSource]:
    """Return the media of `multi_modal_data`: {"image": picture}, {"image": [picture, ...]}, {"audio": sound}, ...

    Args:
        data: of the caller.
        uuids: {"image": uuid} or {"image": [uuid, None, ...]}, one for each item, which may then be None; or None.
        kind: that the model reads.

    Raises:
        InvalidRequestError: it has something else.
    """
    given = {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else None
    if given is None or given.keys() - {kind}:
        found = type(data).__name__ if given is None else sorted(given)
        raise InvalidRequestError(f"{FIELD} has {found}; this model takes {{{kind!r}: {NOUNS[kind]}}}", FIELD)
    items: Any = given.get(kind, None if uuids else [])
    several: Sequence[Any] = [items] if KINDS[kind].is_one(items) else items
    names = _uuids(uuids, len(several), kind)
    return [
        item if isinstance(item, MediaSource) else MediaSource(item, f"{FIELD}[{kind!r}][{place}]", name)
        for place, (item, name) in enumerate(zip(several, names, strict=True))
    ]


def _uuids(uuids: Any, num_items: int, kind: Kind) -> Sequence[str | None]:
    """Return the uuid of each item.

    Raises:
        InvalidRequestError: they are not strings, one for each item.
    """
    if uuids is None:
        return [None] * num_items
    given = uuids.get(kind) if isinstance(uuids, dict) and not uuids.keys() - {kind} else uuids
    several = given if isinstance(given, list | tuple) else [given]
    if len(several) != num_items or any(one is not None and not (isinstance(one, str) and one) for one in several):
        raise InvalidRequestError(
            f"{UUIDS} is {uuids!r}; expected {{{kind!r}: [uuid, ...]}}, a string or None for each of "
            f"{num_items} {NOUNS[kind]}s",
            UUIDS,
        )
    return several


def _spans(places: Sequence[int]) -> list[Span]:
    """Return consecutive positions as spans."""
    spans: list[Span] = []
    for place in places:
        if spans and sum(spans[-1]) == place:
            spans[-1] = (spans[-1][0], spans[-1][1] + 1)
        else:
            spans.append((place, 1))
    return spans
