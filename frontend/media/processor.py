"""`MediaProcessor`: images to tensors and placeholders, through processes that may be killed."""

import hashlib
import os
from collections import OrderedDict
from typing import Any

import msgspec

from octavo.frontend.media.child_processes import ChildProcesses
from octavo.frontend.media.download import MediaError
from octavo.frontend.media.wire import Job, Result, Setup
from octavo.protocol.config import ResolvedConfig


class MediaProcessor:
    """Processes that decode the images of one model. They start when they are needed. Belongs to one event loop.

    Args:
        config: of an engine whose model reads images.
    """

    def __init__(self, config: ResolvedConfig) -> None:
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
        self.num_queries = self.num_hits = 0
        """Images, and those among them whose tensors were kept from an earlier request."""

    async def placeholder(self) -> str:
        """Return the text that stands for an image in a prompt.

        Raises:
            ConfigError: the processor cannot be loaded.
        """
        return (await self._processes.ready()).placeholder

    async def placeholder_id(self) -> int:
        """Return the token that stands for an image in a prompt; raises as `placeholder`."""
        return (await self._processes.ready()).placeholder_id

    async def process(self, data: bytes, size: tuple[int, int] | None, processor_kwargs: dict[str, Any]) -> Result:
        """Return what the model's processor makes of an image.

        Args:
            data: a file, or the pixels of a picture of `size` in RGB.
            size: width and height; None: `data` is a file.
            processor_kwargs: of the request.

        Raises:
            MediaError: the image is damaged, or exceeds a limit of size, memory or time.
            ConfigError: the processor cannot be loaded.
        """
        job = msgspec.msgpack.encode(Job(data, size, processor_kwargs))
        key = hashlib.blake2b(job, digest_size=32).digest()
        self.num_queries += 1
        if (known := self._results.get(key)) is not None:
            self._results.move_to_end(key)
            self.num_hits += 1
            return known
        result = await self._processes.ask(job, Result)
        if result.fault:
            raise MediaError(result.fault)
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


def _num_bytes(result: Result) -> int:
    return (
        sum([len(data) for _, _, data in result.tensors.values()]) + len(result.replacement) + 8 * len(result.token_ids)
    )
