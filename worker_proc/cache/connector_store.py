"""`ConnectorStore`: a connector of the user's as a store of contents. What it raises makes contents missing."""

import logging
from collections.abc import Callable, Collection, Sequence

from octavo.protocol.kv_connector import KVBlock, KVConnectorBase, content_key
from octavo.protocol.log import LimitedLog
from octavo.worker_proc.cache.content_files import Content

logger = logging.getLogger(__name__)


class ConnectorStore:
    """See `ContentStore`.

    Args:
        connector: of this worker.
    """

    def __init__(self, connector: KVConnectorBase) -> None:
        self._connector = connector
        self._log = LimitedLog(logger)

    def read_all(self, folder: str, contents: Sequence[Content]) -> list[bool]:
        """See `ContentStore`."""
        return self._transfer(folder, contents, self._connector.start_load_kv, self._connector.wait_for_load)

    def write_all(self, folder: str, contents: Sequence[Content]) -> list[bool]:
        """See `ContentStore`."""
        return self._transfer(folder, contents, self._connector.save_kv, self._connector.wait_for_save)

    def close(self) -> None:
        """See `ContentStore`."""
        try:
            self._connector.shutdown()
        except Exception as error:  # the author's code, which may raise anything
            logger.warning("the KV connector did not shut down: %s: %s", type(error).__name__, error)

    def _transfer(
        self,
        folder: str,
        contents: Sequence[Content],
        start: Callable[[Sequence[KVBlock]], None],
        wait: Callable[[], Collection[str]],
    ) -> list[bool]:
        blocks = [(content_key(folder, key), content) for key, content in contents]
        try:
            start(blocks)
            missing = set(wait())
        except Exception as error:  # the author's code, which may raise anything
            self._log.warning("the KV connector: %s: %s", type(error).__name__, error)
            return [False] * len(blocks)
        return [key not in missing for key, _ in blocks]
