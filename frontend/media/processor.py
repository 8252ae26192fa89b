"""`MediaProcessor`: images to tensors and placeholders, through processes that may be killed."""

import asyncio
import contextlib
import hashlib
import os
import sys
from collections import OrderedDict
from typing import Any, TypeVar

import msgspec

from octavo.frontend.media.download import MediaError
from octavo.frontend.media.wire import LENGTH, Job, Ready, Result, Setup
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import ConfigError

MAX_PROCESSES = 2
"""More than one, so that a slow image does not hold up the others."""
START_TIME_S = 120.0
"""Time limit of importing `transformers`, on a busy machine."""

Answer = TypeVar("Answer", Ready, Result)


class MediaProcessor:
    """Processes that decode the images of one model. They start when they are needed. Belongs to one event loop.

    Args:
        config: of an engine whose model reads images.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        assert config.media is not None and config.model.media is not None, "a model that reads images"
        self._media = config.media
        self._setup = Setup(
            os.getpid(),
            config.model.media.processor_path,
            config.model.trust_remote_code,
            config.model.media.image_token_id,
            config.media.max_image_pixels,
            config.media.processor_kwargs,
        )
        self._gate = asyncio.Semaphore(MAX_PROCESSES)
        self._idle: list[asyncio.subprocess.Process] = []
        self._placeholder = ""
        self._results: OrderedDict[bytes, Result] = OrderedDict()
        self._num_cached_bytes = 0
        self.num_queries = self.num_hits = 0
        """Images, and those among them whose tensors were kept from an earlier request."""

    async def placeholder(self) -> str:
        """Return the text that stands for an image in a prompt.

        Raises:
            ConfigError: the processor cannot be loaded.
        """
        if not self._placeholder:
            async with self._gate:
                self._idle.append(await self._take())
        return self._placeholder

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
        async with self._gate:
            process = await self._take()
            try:
                async with asyncio.timeout(self._media.decode_timeout_s):
                    result = await _ask(process, job, Result)
            except BaseException as error:
                await _kill(process)
                if isinstance(error, TimeoutError):
                    raise MediaError("it takes too long to decode (--media-decode-timeout)") from None
                if isinstance(error, asyncio.IncompleteReadError | ConnectionError | msgspec.DecodeError):
                    raise MediaError("the process that decoded it has died") from None
                raise
            self._idle.append(process)
        if result.fault:
            raise MediaError(result.fault)
        self._keep(key, result)
        return result

    async def close(self) -> None:
        """End the processes."""
        while self._idle:
            await _kill(self._idle.pop())

    async def _take(self) -> asyncio.subprocess.Process:
        """Return a process without work."""
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "octavo.frontend.media.process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(START_TIME_S):
                ready = await _ask(process, msgspec.msgpack.encode(self._setup), Ready)
        except BaseException as error:
            await _kill(process)
            if isinstance(error, TimeoutError | asyncio.IncompleteReadError | ConnectionError):
                raise ConfigError(f"the process that decodes images does not start: {type(error).__name__}") from error
            raise
        if ready.fault:
            await _kill(process)
            raise ConfigError(
                f"the processor of {self._setup.processor_path} cannot be loaded: {ready.fault}",
                hint="images need pip install 'octavo[image]', and the model's processor files",
            )
        self._placeholder = ready.placeholder
        return process

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


async def _ask(process: asyncio.subprocess.Process, message: bytes, kind: type[Answer]) -> Answer:
    assert process.stdin is not None and process.stdout is not None, "pipes"
    process.stdin.write(LENGTH.pack(len(message)))
    process.stdin.write(message)
    await process.stdin.drain()
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=kind)


async def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
