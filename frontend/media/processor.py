"""`MediaProcessor`: media to tensors and placeholders, through processes that may be killed."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from octavo.frontend.media.child_processes import ChildProcesses
from octavo.frontend.media.download import MediaError
from octavo.frontend.media.kinds import KINDS
from octavo.frontend.media.parts import MediaOptions
from octavo.frontend.media.wire import Result
from octavo.frontend.metrics.call import current_owner
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.media import DIGEST_BYTES, Kind


class MediaProcessor:
    """Processes that decode the media of one model. They start when they are needed. Belongs to one event loop.

    Args:
        config: of an engine whose model reads media.
        on_query: called for each item that is looked up in the cache; True: its tensors were there.
    """

    def __init__(self, config: ResolvedConfig, on_query: Callable[[bool], None] = lambda is_hit: None) -> None:
        assert config.media is not None and config.model.media is not None, "a model that reads media"
        self._media = config.media
        self._processes = {
            name: ChildProcesses(kind.module, kind.setup(config), config.media.decode_timeout_s, kind.hint)
            for name, kind in [(name, KINDS[name]) for name in config.model.media.token_ids]
        }
        self._results: OrderedDict[bytes, Result] = OrderedDict()
        self._num_cached_bytes = 0
        self._on_query = on_query
        self._empty: dict[Kind, Result] = {}
        self._empty_lock = asyncio.Lock()

    async def placeholder(self, kind: Kind) -> str:
        """Return the text that stands for an item of a kind in a prompt.

        Raises:
            ConfigError: the processor cannot be loaded.
        """
        return (await self._processes[kind].ready()).placeholder

    async def placeholder_id(self, kind: Kind) -> int:
        """Return the token that stands for an item of a kind in a prompt; raises as `placeholder`."""
        return (await self._processes[kind].ready()).placeholder_id

    def known(self, name: bytes) -> Result | None:
        """Return what is kept of an item under a name; see `name_of`. Counts a query if there is something."""
        if (result := self._results.get(name)) is not None:
            self._results.move_to_end(name)
            self._on_query(True)
        return result

    async def process(self, kind: Kind, job: msgspec.Struct, name: bytes | None = None) -> Result:
        """Return what the model's processor makes of an item.

        Args:
            kind: of the item.
            job: about the item: see `MediaKind.job`.
            name: is in place of the item's contents for all caches; see `name_of`.

        Raises:
            MediaError: the item is damaged, or exceeds a limit of size, memory or time.
            ConfigError: the processor cannot be loaded.
        """
        data = _encoded(job)
        key = name or hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=kind.encode()).digest()
        if (known := self.known(key)) is not None:
            return known
        self._on_query(False)
        result = await self._processes[kind].ask(data, Result)
        if result.fault:
            raise MediaError(result.fault)
        if name is not None:
            return self.keep(name, result)
        self._keep(key, result)
        return result

    async def empty(self, kind: Kind) -> Result:
        """Return what the model's processor makes of an item without content. It is asked once, beside the cache.

        Raises:
            MediaError: it makes nothing of it, or a process dies.
            ConfigError: the processor cannot be loaded.
        """
        async with self._empty_lock:
            if kind not in self._empty:
                job = KINDS[kind].empty
                assert job is not None, "a kind whose rows can be given"
                result = await self._processes[kind].ask(msgspec.msgpack.encode(job()), Result)
                if result.fault:
                    raise MediaError(f"the model's processor takes no empty item, which rows need: {result.fault}")
                self._empty[kind] = result
        return self._empty[kind]

    def keep(self, name: bytes, result: Result) -> Result:
        """Keep a result under a name, and return it with the digest of an item of that name."""
        named = msgspec.structs.replace(result, digest=_digest_of_named(name, result))
        self._keep(name, named)
        return named

    async def close(self) -> None:
        """End the processes."""
        for processes in self._processes.values():
            await processes.close()

    def _keep(self, key: bytes, result: Result) -> None:
        if (same := self._results.pop(key, None)) is not None:  # two requests have processed it at the same time
            self._num_cached_bytes -= _num_bytes(same)
        self._results[key] = result
        self._num_cached_bytes += _num_bytes(result)
        while self._num_cached_bytes > self._media.processor_cache_bytes:
            _, oldest = self._results.popitem(last=False)
            self._num_cached_bytes -= _num_bytes(oldest)


def name_of(kind: Kind, uuid: str, options: MediaOptions, *, is_given: bool = False) -> bytes:
    """Return the name of an item in all caches, if the caller names it: one for each kind, uuid, tenant, salt and
    processing. A tenant must not see the media of another one by their uuids. `is_given`: its rows are the caller's.

    Raises:
        MediaError: the arguments of the processor are no plain data.
    """
    named = _encoded([kind, uuid, current_owner(), options.cache_salt, dict(options.processor_kwargs)])
    return hashlib.blake2b(named, digest_size=DIGEST_BYTES, person=b"rows" if is_given else b"uuid").digest()


def _encoded(value: Any) -> bytes:
    """Return a value with arguments of the processor as bytes.

    Raises:
        MediaError: they are no plain data.
    """
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, TypeError, ValueError) as error:  # numbers of more than 64 bits, objects, half characters
        raise MediaError(f"mm_processor_kwargs has a value that no processor takes: {error}") from None


def _digest_of_named(name: bytes, result: Result) -> bytes:
    """Return the digest of an item with a name. Another item of this name has another one if its rows differ in
    number: workers must never look for rows that are not there."""
    shapes = [(key, dtype, shape) for key, (dtype, shape, _) in sorted(result.tensors.items())]
    sizes = msgspec.msgpack.encode([result.num_rows, result.grid, result.frame_step, shapes])
    return hashlib.blake2b(name + sizes, digest_size=DIGEST_BYTES).digest()


def _num_bytes(result: Result) -> int:
    return (
        sum([len(data) for _, _, data in result.tensors.values()]) + len(result.replacement) + 8 * len(result.token_ids)
    )
