"""`PluginConnector`: requests wait here until the user's connector has said which blocks of them it can load.

It finds contents only. They are loaded and saved as files are, by the workers' halves of the connector: what it has
found is known to the scheduler as a file would be, so a recording holds it, and a request whose contents do not come is
computed.
"""

import contextlib
import itertools
import logging
import operator
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from octavo.core_proc.cache.hashes import hash_of_block
from octavo.core_proc.file_watch import FileChanges
from octavo.core_proc.request import Request
from octavo.core_proc.request_map import RequestKey
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.scheduler.stop import FinishCause
from octavo.core_proc.transfer.connector_thread import CallThread, ConnectorThread
from octavo.protocol.events import Failed, FailureKind, Finished, FinishReason
from octavo.protocol.ids import RequestId
from octavo.protocol.kv_connector import ConnectorRequest, KVConnectorBase, content_key
from octavo.protocol.kv_transfer import PARAMS
from octavo.protocol.log import LimitedLog
from octavo.protocol.requests import Submit

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""How long the end of the process waits for the connector to return from its last calls."""

MAX_QUEUED_CALLS = 10_000
"""A connector that does not return misses further calls: the queue must not grow without bound."""

MAX_DISCARDED = 1 << 16
"""Contents that must not be loaded although `forget` has not dropped them, the latest ones."""


@dataclass(frozen=True, slots=True)
class _Question:
    """What the connector is asked about one request."""

    number: int
    submit: Submit
    token_ids: list[int]
    keys: list[list[bytes]]
    """Of the contents of each full block."""
    state_keys: list[bytes]
    """Of the recurrent state after each of them; [] if the model has none."""
    num_computed: int
    """Tokens that the cache has."""
    deadline_s: float


@dataclass(frozen=True, slots=True)
class _Found:
    """Which of a question's contents can be loaded."""

    key: RequestKey
    question: _Question
    keys: list[bytes]


@dataclass(frozen=True, slots=True)
class _Forgotten:
    """Contents that later answers do not find."""

    number: int
    keys: Sequence[bytes]


class PluginConnector:
    """Asks the connector on a thread, so that a slow one delays only the requests that it is asked about.

    It is a step hook, and a `ContentWatch` to which nothing happens on its own.

    Args:
        plugin: the half of the connector that is in the core.
        scheduler: has the cache.
        namespace: of the contents: see `folder_name`.
        loads: whether the connector is asked.
        timeout_s: a request that has waited for so long is computed.
        clock: in seconds.
        thread: runs the connector's calls; None: a new one.
    """

    def __init__(
        self,
        plugin: KVConnectorBase,
        scheduler: Scheduler,
        namespace: str,
        *,
        loads: bool,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        thread: CallThread | None = None,
    ) -> None:
        self._plugin = plugin
        self._name = type(plugin).__name__
        self._scheduler = scheduler
        self._namespace = namespace
        self._loads = loads
        self._timeout_s = timeout_s
        self._clock = clock
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = thread or ConnectorThread(clock)
        self._numbers = itertools.count()
        self._waiting: dict[RequestKey, _Question] = {}
        """Requests that the connector is asked about, the oldest first: the scheduler does not know them yet."""
        self._answers: deque[_Found | _Forgotten] = deque()
        """From the connector's thread, in the order of its calls."""
        self._discarded: dict[bytes, int] = {}
        """Contents that must not be loaded, with the number of the `forget` that drops them. Questions before it may
        still find them, and so may others if it fails."""
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
        """Readable when `take_ready` has something to do. Deadlines need none: requests that wait keep the core up."""
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
        if num_cached >= num_blocks or key in self._waiting or self._is_stuck:
            return own
        hash_of_block(request, num_blocks - 1, cache.block_size)
        keys = [[one + suffix for suffix in cache.groups.key_suffixes] for one in request.block_hashes[:num_blocks]]
        states = cache.states
        state_keys = [] if states is None else [states.key(request, 1 + index) for index in range(num_blocks)]
        self._waiting[key] = question = _Question(
            next(self._numbers),
            own,
            list(request.token_ids),
            keys,
            state_keys,
            num_cached * cache.block_size,
            self._clock() + self._timeout_s,
        )
        self._thread.submit(partial(self._ask, key, question.number))
        return []

    def abort(self, client: bytes, request_ids: Sequence[RequestId]) -> list[ClientEvent]:
        """End requests that wait here."""
        ended = [each for each in request_ids if self._waiting.pop((client, each), None) is not None]
        return [(client, Finished(request_id, FinishReason.ABORT)) for request_id in ended]

    def take_ready(self) -> list[tuple[bytes, Submit]]:
        """Return the requests that wait no longer, each after the scheduler knows what can be loaded for it."""
        # Also without answers: the last one may have been read before its thread wrote to the descriptor.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        ready: list[tuple[bytes, Submit]] = []
        while self._answers:
            answer = self._answers.popleft()
            if isinstance(answer, _Forgotten):
                self._note_forgotten(answer)
            elif self._waiting.get(answer.key) is answer.question:  # else it was aborted, or has waited too long
                del self._waiting[answer.key]
                if found := [key for key in answer.keys if key not in self._discarded]:
                    self._scheduler.change_files(found, ())
                ready.append((answer.key[0], answer.question.submit))
        return ready + self._take_overdue()

    def note_ended(self, request_ids: Sequence[RequestId]) -> None:
        """Tell the connector which requests have ended."""
        for request_id in request_ids:
            self._run("request_finished", partial(self._plugin.request_finished, request_id))

    def finish_cause(self, request: Request, cause: FinishCause) -> FinishCause:
        """See `StepHook`."""
        return cause

    def close(self) -> None:
        """End the thread. Blocks until: the connector has returned from its calls, for a bounded time."""
        self._waiting.clear()
        self._thread.submit(partial(self._call, "shutdown", self._plugin.shutdown))
        if self._thread.close(CLOSE_TIMEOUT_S):
            os.close(self._fd)
        else:  # the thread may still write to the descriptor
            logger.warning(
                "KV connector %s: a call has not returned for %.0f s; the core ends without waiting for it",
                self._name,
                self._thread.busy_s,
            )

    def fileno(self) -> int:
        """See `ContentWatch`."""
        return self._fd

    def take(self) -> list[FileChanges]:
        """See `ContentWatch`."""
        return []

    def delete(self, keys: Sequence[bytes]) -> None:
        """See `ContentWatch`."""
        number = next(self._numbers)
        for key in keys:
            self._discarded.pop(key, None)
            self._discarded[key] = number
        for key in list(itertools.islice(self._discarded, max(0, len(self._discarded) - MAX_DISCARDED))):
            del self._discarded[key]
        self._run("forget", partial(self._forget, _Forgotten(number, keys)))

    def list_soon(self) -> None:
        """See `ContentWatch`. Nothing is listed: the connector is asked about each request."""

    def note_written(self, num_bytes: int) -> None:
        """See `ContentWatch`."""

    @property
    def _is_stuck(self) -> bool:
        """Whether a call has not returned for so long that further requests would wait in vain."""
        return self._thread.busy_s >= self._timeout_s

    def _forget(self, forgotten: _Forgotten) -> None:
        """Have the connector drop contents, on its thread."""
        self._plugin.forget([content_key(self._namespace, key) for key in forgotten.keys])
        self._answer(forgotten)

    def _note_forgotten(self, forgotten: _Forgotten) -> None:
        for key in forgotten.keys:
            if self._discarded.get(key) == forgotten.number:
                del self._discarded[key]

    def _take_overdue(self) -> list[tuple[bytes, Submit]]:
        now_s = self._clock()
        overdue: list[tuple[bytes, Submit]] = []
        for key, question in self._waiting.items():
            if question.deadline_s > now_s:
                break
            overdue.append((key[0], question.submit))
        for client, submit in overdue:
            del self._waiting[client, submit.request_id]
        if overdue:
            self._log.warning(
                "KV connector %s: has not answered for %.0f s (--execute-model-timeout), %d requests are computed, "
                "the first is %s",
                self._name,
                self._timeout_s,
                len(overdue),
                overdue[0][1].request_id,
            )
        return overdue

    def _ask(self, key: RequestKey, number: int) -> None:
        """Ask the connector, on its thread."""
        question = self._waiting.get(key)
        if question is None or question.number != number:
            return  # nobody waits for the answer
        size, keys, num_computed = self._scheduler.cache.block_size, question.keys, question.num_computed
        names = [[content_key(self._namespace, one) for one in block] for block in keys]
        state_names = [content_key(self._namespace, one) for one in question.state_keys]
        request = ConnectorRequest(question.submit.request_id, question.token_ids, names, state_names)

        def ask() -> int:
            return operator.index(self._plugin.get_num_new_matched_tokens(request, num_computed))

        num_new = self._call("get_num_new_matched_tokens", ask, f"request {request.request_id} is computed") or 0
        end = (num_computed + num_new) // size
        found = [one for block in keys[num_computed // size : max(0, end)] for one in block]
        if num_new > 0:
            found += question.state_keys[end - 1 : end]
        self._answer(_Found(key, question, found))

    def _answer(self, answer: _Found | _Forgotten) -> None:
        self._answers.append(answer)
        os.eventfd_write(self._fd, 1)

    def _run(self, method: str, body: Callable[[], None]) -> None:
        """Call the connector on its thread, after what it was asked before."""
        if self._thread.num_queued < MAX_QUEUED_CALLS:
            self._thread.submit(partial(self._call, method, body))
        else:
            self._log.warning("KV connector %s: does not return from its calls, %s is omitted", self._name, method)

    def _call(self, method: str, body: Callable[[], int | None], consequence: str = "ignored") -> int | None:
        try:
            return body()
        except Exception as error:  # the author's code, which may raise anything
            self._log.warning(
                "KV connector %s: %s failed, %s: %s: %s", self._name, method, consequence, type(error).__name__, error
            )
            return None
