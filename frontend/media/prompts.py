"""`MediaPrompts`: prompts with media. Turns text or tokens, and media, into tokens and `MediaItem`s."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Container, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import msgspec

from octavo.frontend.media.download import MediaError, read_url
from octavo.frontend.media.items import MAX_SHARED_ROWS, media_items
from octavo.frontend.media.kinds import KINDS, token_id_of
from octavo.frontend.media.live_bytes import LiveMedia
from octavo.frontend.media.parts import NOUNS, MediaOptions, MediaSource, media_parts, take_media
from octavo.frontend.media.precomputed import PrecomputedRows
from octavo.frontend.media.precomputed_results import PrecomputedMedia
from octavo.frontend.media.processor import MediaProcessor, name_of
from octavo.frontend.media.result import beside_images
from octavo.frontend.media.sources import FIELD, KWARGS, kinds_of
from octavo.frontend.media.wire import Result
from octavo.frontend.text.messages import Message
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.media import MAX_ITEM_BYTES, Kind, MediaItem
from octavo.protocol.media_kwargs import kwargs_fault, kwargs_of

Encode = Callable[..., Awaitable[list[int]]]
_NO_OPTIONS = MediaOptions()
_Processed = tuple[MediaSource, Result]


@dataclass(frozen=True, slots=True, eq=False)
class MediaPrompt:
    """A prompt with media."""

    token_ids: list[int]
    """Token ids, with a placeholder for each row."""
    items: tuple[MediaItem, ...]
    duration_s: float = 0.0
    """Duration in seconds of all audio clips together."""


class PromptMaker(Protocol):
    """Makes the prompts of a model that reads media."""

    kinds: Collection[Kind]
    """Kinds of media that the model reads."""

    async def extract(self, messages: Sequence[Message]) -> tuple[list[Message], list[MediaSource]]:
        """Return a conversation with placeholders in place of its media, and the media."""

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
        """Return the prompt of token ids with media."""

    def clear_cache(self) -> None:
        """Drop the results of the media processor."""

    async def close(self) -> None:
        """Stop the processes that decode media."""


class MediaPrompts:
    """Makes the prompts of a model whose media become rows of the prompt. Belongs to one event loop.

    Args:
        config: configuration of the engine.
        encode: tokenizes a text; see `AsyncClient.tokenize`.
        on_query: see `MediaProcessor`.
    """

    def __init__(
        self, config: ResolvedConfig, encode: Encode, on_query: Callable[[bool], None] = lambda is_hit: None
    ) -> None:
        assert config.media is not None and config.model.media is not None, "a model that reads media"
        self._media = config.media
        self._token_ids = {kind: token_id_of(config.model.media, kind) for kind in config.model.media.token_ids}
        self.kinds: Collection[Kind] = self._token_ids
        self._both_ways: Container[Kind] = ("image",) if config.model.media.both_ways_rows else ()
        self._marks_sounds = config.model.media.marks_sounds
        self._encode = encode
        self.processor = MediaProcessor(config, on_query)
        self._live = LiveMedia(config.media.max_live_bytes)
        self._precomputed = PrecomputedMedia(config, self.processor)

    async def extract(self, messages: Sequence[Message]) -> tuple[list[Message], list[MediaSource]]:
        """Return a conversation with placeholders in place of its media, and the media.

        Raises:
            InvalidRequestError: an item has no URL, or the model does not read its kind.
        """
        kinds = self._kinds_in(messages)
        if not kinds:  # needs no decoding process
            return list(messages), []
        return take_media(messages, {kind: await self.processor.placeholder(kind) for kind in kinds})

    async def of_text(
        self,
        text: str,
        sources: Sequence[MediaSource],
        *,
        adds_special_tokens: bool,
        options: MediaOptions = _NO_OPTIONS,
    ) -> MediaPrompt:
        """Return the prompt of a text with one placeholder per item, in the order of the items of each kind.

        Raises:
            InvalidRequestError: an item cannot be used, or the numbers of items and placeholders differ.
            OverloadedError: live requests already hold too many bytes.
        """
        results = await self._process_all(sources, options)
        kinds = {await self.processor.placeholder(kind): kind for kind in kinds_of(sources)}
        pieces = re.split(f"({'|'.join(map(re.escape, kinds))})", text) if kinds else [text]
        items = _in_order([kinds[mark] for mark in pieces[1::2]], sources, results)
        pieces[1::2] = [result.replacement for _, result in items]
        return self._prompt(await self._encode("".join(pieces), add_special_tokens=adds_special_tokens), items)

    async def of_tokens(
        self, token_ids: Sequence[int], sources: Sequence[MediaSource], options: MediaOptions = _NO_OPTIONS
    ) -> MediaPrompt:
        """Return the prompt of token ids with one placeholder per item; raises as `of_text`."""
        results = await self._process_all(sources, options)
        kinds = {await self.processor.placeholder_id(kind): kind for kind in kinds_of(sources)}
        items = _in_order([kinds[token_id] for token_id in token_ids if token_id in kinds], sources, results)
        remaining, expanded = iter(items), list[int]()
        for token_id in token_ids:
            expanded += next(remaining)[1].token_ids if token_id in kinds else [token_id]
        return self._prompt(expanded, items)

    def clear_cache(self) -> None:
        """See `PromptMaker`."""
        self.processor.clear()

    async def close(self) -> None:
        """Stop the processes that decode media."""
        await self.processor.close()

    def _kinds_in(self, messages: Sequence[Message]) -> set[Kind]:
        """Return the kinds of media in a conversation.

        Raises:
            InvalidRequestError: the model does not read one of them.
        """
        kinds = set()
        for kind, path in media_parts(messages):
            if kind not in self._token_ids:
                known = " and ".join([f"{NOUNS[one]}s" for one in self._token_ids])
                raise InvalidRequestError(
                    f"{path}.type: this model reads {known} and no {NOUNS[kind]}s: leave it out", path
                )
            kinds.add(kind)
        return kinds

    async def _process_all(self, sources: Sequence[MediaSource], options: MediaOptions) -> list[Result]:
        for kind in kinds_of(sources):
            own, limit = [source for source in sources if source.kind == kind], self._media.limits[kind]
            if len(own) > limit:
                raise InvalidRequestError(
                    f"the prompt has {len(own)} {NOUNS[kind]}s, and the limit is {limit} (--limit-mm-per-prompt)",
                    own[limit].path,
                )
        if fault := kwargs_fault(options.processor_kwargs, self.kinds):
            raise InvalidRequestError(f"{KWARGS}: {fault}", KWARGS)
        num_bytes = 0

        async def counted(source: MediaSource) -> Result:
            nonlocal num_bytes
            result = await self._process(source, options)
            num_bytes += sum([len(data) for _, _, data in result.tensors.values()])
            # Small files may decode to large media: fail early instead of waiting for the other items.
            self._live.check_prompt(num_bytes, FIELD)
            return result

        tasks = [asyncio.ensure_future(counted(source)) for source in sources]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _process(self, source: MediaSource, options: MediaOptions) -> Result:
        """Return the result of the processor for an item.

        Raises:
            InvalidRequestError: the item cannot be used; the message names it.
        """
        try:
            if isinstance(source.value, PrecomputedRows):
                return await self._process_precomputed(source, source.value, options)
            if source.uuid is None:
                return await self.processor.process(source.kind, await self._read(source, options))
            return await self._process_named(source, source.uuid, options)
        except MediaError as error:
            raise InvalidRequestError(
                f"{source.path}: the {NOUNS[source.kind]} cannot be used: {error}", source.path
            ) from None

    async def _process_precomputed(self, source: MediaSource, item: PrecomputedRows, options: MediaOptions) -> Result:
        """Return the result of rows that the caller has computed. Rows with a known uuid are not read again."""
        if source.uuid is None:
            return await self._precomputed.result(source.kind, item)
        name = name_of(source.kind, source.uuid, options, is_precomputed=True)
        if (known := self.processor.known(name)) is not None:
            return known
        if item.rows is None:
            raise MediaError(f"the server has no rows with the uuid {source.uuid!r} any more: send them with it")
        return self.processor.keep(name, await self._precomputed.result(source.kind, item))

    async def _process_named(self, source: MediaSource, uuid: str, options: MediaOptions) -> Result:
        """Return the result of the processor for an item with a uuid. A known item is not read again."""
        name = name_of(source.kind, uuid, options)
        if (known := self.processor.known(name)) is not None:
            return known
        if source.value is None:
            noun = NOUNS[source.kind]
            raise MediaError(f"the server has no {noun} with the uuid {uuid!r} any more: send the {noun} with it")
        return await self.processor.process(source.kind, await self._read(source, options), name)

    async def _read(self, source: MediaSource, options: MediaOptions) -> msgspec.Struct:
        """Read an item and return its job for `MediaProcessor.process`."""
        value = source.value
        if isinstance(value, str):
            try:
                # resolving a host name has no time limit of its own
                async with asyncio.timeout(self._media.fetch_timeout_s + 1.0):
                    value = await asyncio.to_thread(read_url, value, self._media)
            except TimeoutError:
                raise MediaError("the download takes too long (--media-fetch-timeout)") from None
        own_kwargs = kwargs_of(options.processor_kwargs, source.kind, self.kinds)
        return await asyncio.to_thread(KINDS[source.kind].job, value, own_kwargs, self._media)

    def _prompt(self, token_ids: list[int], processed: Sequence[_Processed]) -> MediaPrompt:
        """Return the prompt; its placeholders become the rows of the items, in order."""
        found: dict[int, list[int]] = {token_id: [] for token_id in self._token_ids.values()}
        for place, token_id in enumerate(token_ids):
            if token_id in found:
                found[token_id].append(place)
        places = {token_id: iter(own) for token_id, own in found.items()}
        items = []
        if self._marks_sounds and any(source.kind == "image" for source, _ in processed):
            processed = [(source, beside_images(source.kind, result)) for source, result in processed]
        for source, result in processed:
            noun, token_id = NOUNS[source.kind], self._token_ids[source.kind]
            if (num_rows := max(result.part_rows, default=result.num_rows)) > self._media.max_item_tokens:
                raise InvalidRequestError(
                    f"{source.path}: the {noun} has {num_rows} tokens, and the limit is "
                    f"{self._media.max_item_tokens}: send a smaller one (--max-num-encoder-tokens and "
                    "--encoder-cache-tokens limit it)",
                    source.path,
                )
            own = list(islice(places[token_id], result.num_rows))
            if len(own) < result.num_rows:
                raise InvalidRequestError(
                    f"the prompt has fewer placeholders than rows of media: the model's tokenizer does not make token "
                    f"{token_id}, which config.json names, of each",
                    FIELD,
                )
            made = media_items(
                result,
                own,
                source.kind,
                max_shared_rows=min(MAX_SHARED_ROWS, self._media.max_num_encoder_tokens, self._media.max_item_tokens),
                is_both_ways=source.kind in self._both_ways,
            )
            items += made
            if any(item.num_bytes > MAX_ITEM_BYTES for item in made):
                raise InvalidRequestError(
                    f"{source.path}: the processed {noun} has more than {MAX_ITEM_BYTES} bytes", source.path
                )
        if any(next(rest, None) is not None for rest in places.values()):
            raise InvalidRequestError("the prompt has more placeholders than rows of media", FIELD)
        self._live.hold_prompt(items, FIELD)
        return MediaPrompt(token_ids, tuple(items), sum([result.duration_s for _, result in processed]))


def _in_order(marks: Sequence[Kind], sources: Sequence[MediaSource], results: Sequence[Result]) -> list[_Processed]:
    """Return the items in the order of their placeholders.

    Args:
        marks: kinds of the prompt's placeholders, in order.
        sources: the items; those of one kind are already in order.
        results: one per item.

    Raises:
        InvalidRequestError: the numbers of items and placeholders differ.
    """
    remaining: dict[Kind, list[_Processed]] = {}
    for source, result in zip(sources, results, strict=True):
        remaining.setdefault(source.kind, []).append((source, result))
    for kind, own in remaining.items():
        if (num_marks := marks.count(kind)) != len(own):
            noun = NOUNS[kind]
            raise InvalidRequestError(
                f"the prompt has {num_marks} placeholders of {noun}s for {len(own)} {noun}s: each {noun} needs one, "
                "and no text may contain it",
                own[0][0].path,
            )
    following = {kind: iter(own) for kind, own in remaining.items()}
    return [next(following[kind]) for kind in marks]
