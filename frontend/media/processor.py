"""`MediaProcessor`: turns media into tensors and placeholders, in processes that may be killed."""

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
    """Processes that decode the media of one model, started on demand. Belongs to one event loop.

    Args:
        config: configuration of an engine whose model reads media.
        on_query: called for each cache lookup of an item, with whether it was a hit.
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
        """Return the token id that stands for an item of a kind in a prompt; raises as `placeholder`."""
        return (await self._processes[kind].ready()).placeholder_id

    def known(self, name: bytes) -> Result | None:
        """Look up a result by the item's name; see `name_of`. Only a hit counts as a query."""
        if (result := self._results.get(name)) is not None:
            self._results.move_to_end(name)
            self._on_query(True)
        return result

    async def process(self, kind: Kind, job: msgspec.Struct, name: bytes | None = None) -> Result:
        """Return the result of the model's processor for an item.

        Args:
            kind: kind of the item.
            job: the job that decodes the item; see `MediaKind.job`.
            name: replaces the item's contents as the key in all caches; see `name_of`.

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
        """Return the result of the model's processor for an empty item. It is computed once, outside the cache.

        Raises:
            MediaError: the processor rejects the empty item, or a process dies.
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
        """Store a result under a name, and return it with the digest that belongs to the name."""
        named = msgspec.structs.replace(result, digest=_digest_of_named(name, result))
        self._keep(name, named)
        return named

    def clear(self) -> None:
        """Drop all cached results. Later requests process their items again, including those that name them by uuid."""
        self._results.clear()
        self._num_cached_bytes = 0

    async def close(self) -> None:
        """Stop the processes."""
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


def name_of(kind: Kind, uuid: str, options: MediaOptions, *, is_precomputed: bool = False) -> bytes:
    """Return the cache name of an item that the caller named: unique per kind, uuid, tenant, salt and processor
    arguments.

    A tenant must not see the media of another tenant by guessing uuids. `is_precomputed`: the caller sends the item's
    rows.

    Raises:
        MediaError: the arguments of the processor are not plain data.
    """
    named = _encoded([kind, uuid, current_owner(), options.cache_salt, dict(options.processor_kwargs)])
    return hashlib.blake2b(named, digest_size=DIGEST_BYTES, person=b"rows" if is_precomputed else b"uuid").digest()


def _encoded(value: Any) -> bytes:
    """Encode a value with arguments of the processor.

    Raises:
        MediaError: the arguments are not plain data.
    """
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, TypeError, ValueError) as error:  # integers of more than 64 bits, objects, lone surrogates
        raise MediaError(f"mm_processor_kwargs has a value that no processor takes: {error}") from None


def _digest_of_named(name: bytes, result: Result) -> bytes:
    """Return the digest of a named item. It covers the shapes of the tensors: if another item is sent under the same
    name with another number of rows, workers must not look for rows that do not exist.
    """
    shapes = [(key, dtype, shape) for key, (dtype, shape, _) in sorted(result.tensors.items())]
    sizes = msgspec.msgpack.encode([result.num_rows, result.grid, result.frame_step, shapes])
    return hashlib.blake2b(name + sizes, digest_size=DIGEST_BYTES).digest()


def _num_bytes(result: Result) -> int:
    return (
        sum([len(data) for _, _, data in result.tensors.values()]) + len(result.replacement) + 8 * len(result.token_ids)
    )
