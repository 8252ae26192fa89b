"""`ConnectorStore`: a user's KV connector as a content store. If the connector raises, its contents count as
missing."""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from octavo.protocol.kv_connector import KVBlock, KVConnectorBase, content_key
from octavo.protocol.log import LimitedLog
from octavo.worker_proc.cache.content_files import Content

logger = logging.getLogger(__name__)


class ConnectorStore:
    """See `ContentStore`.

    Args:
        connector: connector of this worker.
    """

    def __init__(self, connector: KVConnectorBase) -> None:
        name = type(connector).__name__
        self._connector = connector
        self._loads = _Transfers(name, connector.start_load_kv, connector.wait_for_load, "will be computed")
        self._saves = _Transfers(name, connector.save_kv, connector.wait_for_save, "are not saved")

    def read_all(self, folder: str, contents: Sequence[Content]) -> list[bool]:
        """See `ContentStore`."""
        buffers = self._loads.take_buffers(contents)
        are_there = self._loads.run(folder, contents, buffers)
        for (_, content), buffer, is_there in zip(contents, buffers, are_there, strict=True):
            if is_there:
                content[:] = buffer
        return are_there

    def write_all(self, folder: str, contents: Sequence[Content]) -> list[bool]:
        """See `ContentStore`."""
        buffers = self._saves.take_buffers(contents)
        for (_, content), buffer in zip(contents, buffers, strict=True):
            buffer[:] = content
        return self._saves.run(folder, contents, buffers)

    def close(self) -> None:
        """See `ContentStore`."""
        try:
            self._connector.shutdown()
        except Exception as error:  # user code, which may raise anything
            name = type(self._connector).__name__
            logger.warning("KV connector %s: shutdown failed, ignored: %s: %s", name, type(error).__name__, error)


class _Transfers:
    """One direction of transfers, on one thread.

    The connector gets buffers of this class, not the rows of host memory, which `BlockLoader` reuses. If the connector
    raises while it waits for transfers, their end is unknown, and a late transfer must not overwrite other contents.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[Sequence[KVBlock]], None],
        wait: Callable[[], Collection[str]],
        consequence: str,
    ) -> None:
        self._name = name
        self._start = start
        self._wait = wait
        self._consequence = consequence
        self._free: defaultdict[int, list[bytearray]] = defaultdict(list)
        """Buffers that the connector does not use, by size: the size of blocks and the size of states."""
        self._log = LimitedLog(logger)

    def take_buffers(self, contents: Sequence[Content]) -> list[bytearray]:
        """Return a buffer for each content, for the next `run`."""
        sizes = [len(content) for _, content in contents]
        return [self._free[size].pop() if self._free[size] else bytearray(size) for size in sizes]

    def run(self, folder: str, contents: Sequence[Content], buffers: list[bytearray]) -> list[bool]:
        """Transfer contents to or from buffers. Return for each whether it was transferred."""
        blocks = [
            (content_key(folder, key), memoryview(buffer)) for (key, _), buffer in zip(contents, buffers, strict=True)
        ]
        has_started = False
        try:
            self._start(blocks)
            has_started = True
        except Exception as error:  # user code, which may raise anything
            self._warn(self._start, len(blocks), error)
        try:
            missing = set(self._wait())
        except Exception as error:  # user code, which may raise anything
            self._warn(self._wait, len(blocks), error)
            return [False] * len(blocks)  # the connector keeps the buffers
        for buffer in buffers:
            self._free[len(buffer)].append(buffer)
        return [has_started and key not in missing for key, _ in blocks]

    def _warn(self, method: Callable[..., object], num_blocks: int, error: Exception) -> None:
        self._log.warning(
            "KV connector %s: %s failed, %d blocks %s: %s: %s",
            self._name,
            getattr(method, "__name__", method),
            num_blocks,
            self._consequence,
            type(error).__name__,
            error,
        )
