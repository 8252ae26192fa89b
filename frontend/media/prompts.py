"""`MediaPrompts`: prompts with images, from text or tokens and the images to tokens and `MediaItem`s."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from octavo.frontend.media.download import MediaError, read_url
from octavo.frontend.media.live_bytes import LiveBuffer, LiveMedia
from octavo.frontend.media.parts import MediaOptions, MediaSource, has_media, take_media
from octavo.frontend.media.pixels import in_rgb
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
    """A prompt with images."""

    token_ids: list[int]
    """With a placeholder for each row."""
    items: tuple[MediaItem, ...]


class PromptMaker(Protocol):
    """Makes the prompts of a model with media."""

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
    """Makes the prompts of a model that reads images. Belongs to one event loop.

    Args:
        config: of the engine.
        encode: tokenizes: see `AsyncClient.tokenize`.
        on_query: see `MediaProcessor`.
    """

    def __init__(
        self, config: ResolvedConfig, encode: Encode, on_query: Callable[[bool], None] = lambda is_hit: None
    ) -> None:
        assert config.media is not None and config.model.media is not None, "a model that reads images"
        self._media = config.media
        assert config.model.media.image_token_id is not None, "a model that reads images"
        self._token_id = config.model.media.image_token_id
        self._is_both_ways = config.model.media.both_ways_rows > 0
        self._encode = encode
        self.processor = MediaProcessor(config, on_query)
        self._live = LiveMedia(config.media.max_live_bytes)

    async def take(self, messages: Sequence[Message]) -> tuple[list[Message], list[MediaSource]]:
        """Return a conversation with marks in place of its images, and the images.

        Raises:
            InvalidRequestError: an image has no URL.
        """
        if not has_media(messages):  # needs no process that decodes any
            return list(messages), []
        return take_media(messages, await self.processor.placeholder())

    async def of_text(
        self,
        text: str,
        sources: Sequence[MediaSource],
        *,
        adds_special_tokens: bool,
        options: MediaOptions = _NO_OPTIONS,
    ) -> MediaPrompt:
        """Return the prompt of a text that has a placeholder for each image.

        Raises:
            InvalidRequestError: an image cannot be used, or their number is another one.
            OverloadedError: live requests hold as many images as they may.
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
        """Return the prompt of tokens that have one placeholder for each image; raises as `of_text`."""
        results = await self._process_all(sources, options)
        placeholder_id = await self.processor.placeholder_id()
        self._check_count(list(token_ids).count(placeholder_id), sources)
        remaining, expanded = iter(results), list[int]()
        for token_id in token_ids:
            expanded += next(remaining).token_ids if token_id == placeholder_id else [token_id]
        return self._prompt(expanded, results, sources)

    async def close(self) -> None:
        """End the processes that decode images."""
        await self.processor.close()

    async def _process_all(self, sources: Sequence[MediaSource], options: MediaOptions) -> list[Result]:
        limit = self._media.limits["image"]
        if len(sources) > limit:
            raise InvalidRequestError(
                f"the prompt has {len(sources)} images, and the limit is {limit} (--limit-mm-per-prompt)",
                sources[limit].path,
            )
        tasks = [asyncio.ensure_future(self._process(source, options)) for source in sources]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _process(self, source: MediaSource, options: MediaOptions) -> Result:
        """Return what the processor makes of an image.

        Raises:
            InvalidRequestError: it cannot be used; the message names it.
        """
        try:
            if source.uuid is None:
                return await self.processor.process(*await self._read(source.value), options.processor_kwargs)
            return await self._process_named(source, source.uuid, options)
        except MediaError as error:
            raise InvalidRequestError(f"{source.path}: the image cannot be used: {error}", source.path) from None

    async def _process_named(self, source: MediaSource, uuid: str, options: MediaOptions) -> Result:
        """Return what the processor makes of an image with a uuid. A known one is not read again."""
        name = name_of(uuid, options)
        if (known := self.processor.known(name)) is not None:
            return known
        if source.value is None:
            raise MediaError(f"the server has no image with the uuid {uuid!r} any more: send the image with it")
        return await self.processor.process(*await self._read(source.value), options.processor_kwargs, name)

    async def _read(self, value: Any) -> tuple[bytes, tuple[int, int] | None]:
        """Return an image as `MediaProcessor.process` takes it."""
        if isinstance(value, bytes):
            return value, None
        if isinstance(value, str):
            try:
                async with asyncio.timeout(self._media.fetch_timeout_s + 1.0):  # resolving a name has no limit
                    return await asyncio.to_thread(read_url, value, self._media), None
            except TimeoutError:
                raise MediaError("the download takes too long (--media-fetch-timeout)") from None
        return await asyncio.to_thread(_pixels_of, value, self._media.max_image_pixels)

    def _check_count(self, num_placeholders: int, sources: Sequence[MediaSource]) -> None:
        if num_placeholders != len(sources):
            raise InvalidRequestError(
                f"the prompt has {num_placeholders} placeholders of images for {len(sources)} images: each image needs "
                "one, and no text may contain it",
                sources[0].path if sources else FIELD,
            )

    def _prompt(self, token_ids: list[int], results: Sequence[Result], sources: Sequence[MediaSource]) -> MediaPrompt:
        """Return the prompt, whose placeholders are the rows of the images in order."""
        places = iter([place for place, token_id in enumerate(token_ids) if token_id == self._token_id])
        items = []
        for result, source in zip(results, sources, strict=True):
            if result.num_rows > self._media.max_item_tokens:
                raise InvalidRequestError(
                    f"{source.path}: the image has {result.num_rows} tokens, and the limit is "
                    f"{self._media.max_item_tokens}: send a smaller one (--max-num-encoder-tokens and "
                    "--encoder-cache-tokens limit it)",
                    source.path,
                )
            tensors = {
                name: MediaTensor(dtype, shape, LiveBuffer(data))
                for name, (dtype, shape, data) in result.tensors.items()
            }
            spans = _spans([next(places) for _ in range(result.num_rows)])
            item = MediaItem(spans, result.digest, tensors, result.grid, is_both_ways=self._is_both_ways)
            if item.num_bytes > MAX_ITEM_BYTES:
                raise InvalidRequestError(
                    f"{source.path}: the processed image has more than {MAX_ITEM_BYTES} bytes", source.path
                )
            items.append(item)
        if next(places, None) is not None:
            raise InvalidRequestError("the prompt has more placeholders than rows of images", FIELD)
        self._live.hold(items, FIELD)
        return MediaPrompt(token_ids, tuple(items))


def sources_of(data: Any, uuids: Any = None) -> list[MediaSource]:
    """Return the media of `multi_modal_data`: {"image": picture}, {"image": [picture, ...]} or {"audio": sound}.

    `uuids`: {"image": uuid} or {"image": [uuid, None, ...]}, one for each picture, which may then be None.

    Raises:
        InvalidRequestError: it has something else.
    """
    if not isinstance(data, dict) or (unknown := data.keys() - {"image", "audio"}):
        found = sorted(unknown) if isinstance(data, dict) else type(data).__name__
        raise InvalidRequestError(
            f"{FIELD} has {found}; this release takes {{'image': picture}} and {{'audio': sound}}", FIELD
        )
    if data.get("audio") is not None:
        return [MediaSource(data["audio"], f"{FIELD}['audio']")]
    images = data.get("image")
    several = images if isinstance(images, list | tuple) else [] if images is None and not uuids else [images]
    names = _uuids(uuids, len(several))
    return [
        image if isinstance(image, MediaSource) else MediaSource(image, f"{FIELD}['image'][{place}]", name)
        for place, (image, name) in enumerate(zip(several, names, strict=True))
    ]


def _uuids(uuids: Any, num_images: int) -> Sequence[str | None]:
    """Return the uuid of each image.

    Raises:
        InvalidRequestError: they are not strings, one for each image.
    """
    if uuids is None:
        return [None] * num_images
    given = uuids.get("image") if isinstance(uuids, dict) and not uuids.keys() - {"image"} else uuids
    several = given if isinstance(given, list | tuple) else [given]
    if len(several) != num_images or any(one is not None and not (isinstance(one, str) and one) for one in several):
        raise InvalidRequestError(
            f"{UUIDS} is {uuids!r}; expected {{'image': [uuid, ...]}}, a string or None for each of "
            f"{num_images} images",
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


def _pixels_of(value: Any, max_pixels: int) -> tuple[bytes, tuple[int, int]]:
    """Return the pixels and the size of a picture of Pillow, or of an array of height, width and RGB in bytes.

    Raises:
        MediaError: it is something else, or too large.
    """
    if hasattr(value, "convert") and hasattr(value, "getbands"):
        width, height = value.size
        if width * height > max_pixels:
            raise MediaError(f"it has {width} x {height} pixels, more than {max_pixels} (--max-image-pixels)")
        return in_rgb(value).tobytes(), (width, height)
    shape: tuple[int, ...] = tuple(getattr(value, "shape", ()))
    dtype = str(getattr(value, "dtype", ""))
    if len(shape) != 3 or shape[2] != 3 or dtype != "uint8":
        raise MediaError(
            f"it is a {type(value).__name__}; expected a URL, the bytes of a file, a PIL.Image or an array of uint8 "
            "with shape (height, width, 3)"
        )
    if shape[0] * shape[1] > max_pixels:
        raise MediaError(f"it has {shape[1]} x {shape[0]} pixels, more than {max_pixels} (--max-image-pixels)")
    return value.tobytes(), (shape[1], shape[0])
