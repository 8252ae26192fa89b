"""`MediaProcessor`: images to tensors and placeholders, through processes that may be killed."""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from octavo.frontend.media.child_processes import ChildProcesses
from octavo.frontend.media.download import MediaError
from octavo.frontend.media.parts import MediaOptions
from octavo.frontend.media.wire import Job, Result, Setup
from octavo.frontend.metrics.call import current_owner
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.media import DIGEST_BYTES


class MediaProcessor:
    """Processes that decode the images of one model. They start when they are needed. Belongs to one event loop.

    Args:
        config: of an engine whose model reads images.
        on_query: called for each image that is looked up in the cache; True: its tensors were there.
    """

    def __init__(self, config: ResolvedConfig, on_query: Callable[[bool], None] = lambda is_hit: None) -> None:
        assert config.media is not None and config.model.media is not None, "a model that reads images"
        self._media = config.media
        assert config.model.media.image_token_id is not None, "a model that reads images"
        setup = Setup(
            os.getpid(),
            config.model.media.processor_path,
            config.model.trust_remote_code,
            config.model.media.image_token_id,
            config.media.max_image_pixels,
            config.media.processor_kwargs,
        )
        self._processes = ChildProcesses(
            "octavo.frontend.media.process",
            setup,
            config.media.decode_timeout_s,
            "images need pip install 'octavo[image]', and the model's processor files",
        )
        self._results: OrderedDict[bytes, Result] = OrderedDict()
        self._num_cached_bytes = 0
        self._on_query = on_query

    async def placeholder(self) -> str:
        """Return the text that stands for an image in a prompt.

        Raises:
            ConfigError: the processor cannot be loaded.
        """
        return (await self._processes.ready()).placeholder

    async def placeholder_id(self) -> int:
        """Return the token that stands for an image in a prompt; raises as `placeholder`."""
        return (await self._processes.ready()).placeholder_id

    def known(self, name: bytes) -> Result | None:
        """Return what is kept of an image under a name; see `name_of`. Counts a query if there is something."""
        if (result := self._results.get(name)) is not None:
            self._results.move_to_end(name)
            self._on_query(True)
        return result

    async def process(
        self,
        data: bytes,
        size: tuple[int, int] | None,
        processor_kwargs: Mapping[str, Any],
        name: bytes | None = None,
    ) -> Result:
        """Return what the model's processor makes of an image.

        Args:
            data: a file, or the pixels of a picture of `size` in RGB.
            size: width and height; None: `data` is a file.
            processor_kwargs: of the request.
            name: is in place of the image's contents for all caches; see `name_of`.

        Raises:
            MediaError: the image is damaged, or exceeds a limit of size, memory or time.
            ConfigError: the processor cannot be loaded.
        """
        job = msgspec.msgpack.encode(Job(data, size, dict(processor_kwargs)))
        key = name or hashlib.blake2b(job, digest_size=DIGEST_BYTES).digest()
        if (known := self.known(key)) is not None:
            return known
        self._on_query(False)
        result = await self._processes.ask(job, Result)
        if result.fault:
            raise MediaError(result.fault)
        if name is not None:
            result = msgspec.structs.replace(result, digest=_digest_of_named(name, result))
        self._keep(key, result)
        return result

    async def close(self) -> None:
        """End the processes."""
        await self._processes.close()

    def _keep(self, key: bytes, result: Result) -> None:
        self._results[key] = result
        self._num_cached_bytes += _num_bytes(result)
        while self._num_cached_bytes > self._media.processor_cache_bytes:
            _, oldest = self._results.popitem(last=False)
            self._num_cached_bytes -= _num_bytes(oldest)


def name_of(uuid: str, options: MediaOptions) -> bytes:
    """Return the name of an image in all caches, if the caller names it: one for each uuid, tenant, salt and
    processing. A tenant must not see the images of another one by their uuids."""
    named = msgspec.msgpack.encode([uuid, current_owner(), options.cache_salt, dict(options.processor_kwargs)])
    return hashlib.blake2b(named, digest_size=DIGEST_BYTES, person=b"uuid").digest()


def _digest_of_named(name: bytes, result: Result) -> bytes:
    """Return the digest of an image with a name. Another image of this name has another one if its rows differ in
    number: workers must never look for rows that are not there."""
    shapes = [(key, dtype, shape) for key, (dtype, shape, _) in sorted(result.tensors.items())]
    sizes = msgspec.msgpack.encode([result.num_rows, result.grid, shapes])
    return hashlib.blake2b(name + sizes, digest_size=DIGEST_BYTES).digest()


def _num_bytes(result: Result) -> int:
    return (
        sum([len(data) for _, _, data in result.tensors.values()]) + len(result.replacement) + 8 * len(result.token_ids)
    )
