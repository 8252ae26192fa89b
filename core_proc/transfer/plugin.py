"""`PluginConnector`: requests wait here until the user's connector has said which blocks of them it can load.

It finds contents only. They are loaded and saved as files are, by the workers' halves of the connector: what it has
found is known to the scheduler as a file would be, so a recording holds it, and a request whose contents do not come is
computed.
"""

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from octavo.core_proc.cache.hashes import hash_of_block
from octavo.core_proc.file_watch import FileChanges
from octavo.core_proc.request import Request
from octavo.core_proc.request_map import RequestKey
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.scheduler.stop import FinishCause
from octavo.protocol.events import Failed, FailureKind, Finished, FinishReason
from octavo.protocol.ids import RequestId
from octavo.protocol.kv_connector import ConnectorRequest, KVConnectorBase, content_key
from octavo.protocol.kv_transfer import PARAMS
from octavo.protocol.log import LimitedLog
from octavo.protocol.requests import Submit

logger = logging.getLogger(__name__)


class PluginConnector:
    """Asks the connector on a thread, so that a slow one delays only the requests that it is asked about.

    It is a step hook, and a `ContentWatch` to which nothing happens on its own.

    Args:
        plugin: the half of the connector that is in the core.
        scheduler: has the cache.
        namespace: of the contents: see `folder_name`.
        loads: whether the connector is asked.
    """

    def __init__(self, plugin: KVConnectorBase, scheduler: Scheduler, namespace: str, *, loads: bool) -> None:
        self._plugin = plugin
        self._scheduler = scheduler
        self._namespace = namespace
        self._loads = loads
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = ThreadPoolExecutor(1, "KV connector")
        self._waiting: dict[RequestKey, Submit] = {}
        """Requests that the connector is asked about: the scheduler does not know them yet."""
        self._answers: deque[tuple[RequestKey, Submit, list[bytes]]] = deque()
        """Requests, and the keys of what was found for them."""
        self._log = LimitedLog(logger)
        scheduler.hooks.add(self)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for an answer."""
        return len(self._waiting)

    def is_waiting(self, key: RequestKey) -> bool:
        """Return whether this request waits for an answer."""
        return key in self._waiting

    @property
    def wake_fds(self) -> Sequence[int]:
        """Readable when `take_ready` has something to do."""
        return [self._fd]

    def on_step(self) -> list[ClientEvent]:
        """Do nothing: `FileStore` has the workers save."""
        return []

    def submit(self, client: bytes, submit: Submit) -> Submit | list[ClientEvent]:
        """Ask for the blocks of a request that the cache lacks.

        Returns:
            The request that the scheduler gets now; or that it has ended, or none if it waits here.
        """
        if submit.kv_transfer is not None and not submit.is_continued:
            message = f"{PARAMS}: the connector of this engine finds blocks by their content, and takes no parameters"
            return [(client, Failed(submit.request_id, FailureKind.INVALID, message, PARAMS))]
        own = msgspec.structs.replace(submit, kv_transfer=None)
        cache, request = self._scheduler.cache, Request(client, own, 0, 0.0)
        num_blocks = (len(request.token_ids) - 1) // cache.block_size
        is_open = cache.files is not None and cache.files.is_open
        if not (self._loads and is_open and num_blocks and request.reads_prefix_cache):
            return own
        num_cached = cache.count_hits(request)[0].num_blocks
        key = client, submit.request_id
        if num_cached >= num_blocks or key in self._waiting:
            return own
        hash_of_block(request, num_blocks - 1, cache.block_size)
        keys = [[one + suffix for suffix in cache.groups.key_suffixes] for one in request.block_hashes[:num_blocks]]
        self._waiting[key] = own
        self._thread.submit(self._ask, key, own, list(request.token_ids), keys, num_cached * cache.block_size)
        return []

    def abort(self, client: bytes, request_ids: Sequence[RequestId]) -> list[ClientEvent]:
        """End requests that wait here, and tell the connector of all that end."""
        for request_id in request_ids:
            self._run(partial(self._plugin.request_finished, request_id))
        ended = [each for each in request_ids if self._waiting.pop((client, each), None) is not None]
        return [(client, Finished(request_id, FinishReason.ABORT)) for request_id in ended]

    def take_ready(self) -> list[tuple[bytes, Submit]]:
        """Return the requests that wait no longer, each after the scheduler knows what can be loaded for it."""
        if not self._answers:
            return []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        ready: list[tuple[bytes, Submit]] = []
        while self._answers:
            key, submit, found = self._answers.popleft()
            if self._waiting.get(key) is not submit:
                continue  # it was aborted, and its id may be another request's
            del self._waiting[key]
            if found:
                self._scheduler.change_files(found, ())
            ready.append((key[0], submit))
        return ready

    def finish_cause(self, request: Request, cause: FinishCause) -> FinishCause:
        """Tell the connector that a request finishes; return `cause`."""
        self._run(partial(self._plugin.request_finished, request.request_id))
        return cause

    def close(self) -> None:
        """End the thread. Blocks until: the connector has answered what it was asked."""
        self._thread.shutdown(cancel_futures=True)
        self._call(self._plugin.shutdown)
        os.close(self._fd)

    def fileno(self) -> int:
        """See `ContentWatch`."""
        return self._fd

    def take(self) -> list[FileChanges]:
        """See `ContentWatch`."""
        return []

    def delete(self, keys: Sequence[bytes]) -> None:
        """See `ContentWatch`."""
        names = [content_key(self._namespace, key) for key in keys]
        self._run(partial(self._plugin.forget, names))

    def note_written(self, num_bytes: int) -> None:
        """See `ContentWatch`."""

    def _ask(
        self, key: RequestKey, submit: Submit, token_ids: list[int], keys: list[list[bytes]], num_computed: int
    ) -> None:
        """Ask the connector, on its thread."""
        size = self._scheduler.cache.block_size
        names = [[content_key(self._namespace, one) for one in block] for block in keys]
        request = ConnectorRequest(submit.request_id, token_ids, names)
        num_new = self._call(lambda: self._plugin.get_num_new_matched_tokens(request, num_computed))
        end = (num_computed + num_new) // size if isinstance(num_new, int) else 0
        found = [one for block in keys[num_computed // size : max(0, end)] for one in block]
        self._answers.append((key, submit, found))
        os.eventfd_write(self._fd, 1)

    def _run(self, body: Callable[[], object]) -> None:
        """Call the connector on its thread, after what it was asked before."""
        self._thread.submit(self._call, body)

    def _call(self, body: Callable[[], object]) -> object:
        try:
            return body()
        except Exception as error:  # the author's code, which may raise anything
            self._log.warning("the KV connector: %s: %s", type(error).__name__, error)
            return None
