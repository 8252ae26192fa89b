"""`PluginConnector`: holds requests until the user's connector has reported which of their blocks it can load.

The core's half only looks blocks up. The workers' halves of the connector load and save them, as with files. The
scheduler treats found blocks like files. So a recording contains them, and a request whose blocks do not arrive is
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
"""Seconds that the exiting process waits for the connector to return from its last calls."""

MAX_QUEUED_CALLS = 10_000
"""Most queued calls. If the connector does not return, further calls are dropped so that the queue stays bounded."""

MAX_DISCARDED = 1 << 16
"""Number of keys remembered that must not be loaded although `forget` has not dropped them; the latest ones."""


@dataclass(frozen=True, slots=True)
class _Question:
    """A lookup by the connector for one request."""

    number: int
    submit: Submit
    token_ids: list[int]
    keys: list[list[bytes]]
    """Keys of each full block, one per group."""
    state_keys: list[bytes]
    """Key of the recurrent state after each block. Empty if the model has none."""
    num_computed: int
    """Number of tokens that are cached already."""
    deadline_s: float


@dataclass(frozen=True, slots=True)
class _Found:
    """The keys of a lookup that can be loaded."""

    key: RequestKey
    question: _Question
    keys: list[bytes]


@dataclass(frozen=True, slots=True)
class _Forgotten:
    """Keys that later lookups do not find."""

    number: int
    keys: Sequence[bytes]


class PluginConnector:
    """Calls the connector in a thread, so that a slow connector delays only the requests that it looks up.

    It is a step hook, and a `ContentWatch` that never reports changes by itself.

    Args:
        plugin: the core's half of the connector.
        scheduler: holds the cache.
        namespace: namespace of the keys: see `folder_name`.
        loads: whether the connector is asked for blocks.
        timeout_s: a request that has waited for this many seconds is computed.
        clock: returns the time in seconds.
        thread: runs the connector's calls. None to create one.
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
        """Requests that the connector looks up, the oldest first. The scheduler does not know them yet."""
        self._answers: deque[_Found | _Forgotten] = deque()
        """Results from the connector's thread, in the order of its calls."""
        self._discarded: dict[bytes, int] = {}
        """Keys that must not be loaded, with the number of the `forget` call that drops them. Lookups before that call
        may still find them, and later ones too if it fails."""
        self._log = LimitedLog(logger)
        scheduler.hooks.add(self)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a lookup."""
        return len(self._waiting)

    def is_waiting(self, key: RequestKey) -> bool:
        """Return whether this request waits for a lookup."""
        return key in self._waiting

    @property
    def wake_fds(self) -> Sequence[int]:
        """Readable when `take_ready` has work to do. Deadlines need no descriptor: waiting requests keep the core
        awake."""
        return [self._fd]

    def on_step(self) -> list[ClientEvent]:
        """Do nothing: `FileStore` has the workers save blocks."""
        return []

    def submit(self, client: bytes, submit: Submit) -> Submit | list[ClientEvent]:
        """Look up the blocks of a request that are not cached.

        Returns:
            The request if the scheduler should receive it now. Otherwise events: of its end, or none if it waits here.
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
        """Abort requests that wait here."""
        ended = [each for each in request_ids if self._waiting.pop((client, each), None) is not None]
        return [(client, Finished(request_id, FinishReason.ABORT)) for request_id in ended]

    def take_ready(self) -> list[tuple[bytes, Submit]]:
        """Return the requests that have finished waiting, after the scheduler knows what can be loaded for them."""
        # Even without results: the last one may have been read before its thread wrote to the descriptor.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        ready: list[tuple[bytes, Submit]] = []
        while self._answers:
            answer = self._answers.popleft()
            if isinstance(answer, _Forgotten):
                self._note_forgotten(answer)
            elif self._waiting.get(answer.key) is answer.question:  # otherwise it was aborted or timed out
                del self._waiting[answer.key]
                if found := [key for key in answer.keys if key not in self._discarded]:
                    self._scheduler.change_files(found, ())
                ready.append((answer.key[0], answer.question.submit))
        return ready + self._take_overdue()

    def note_ended(self, request_ids: Sequence[RequestId]) -> None:
        """Notify the connector of ended requests."""
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
        """See `ContentWatch`. Does nothing: the connector is asked for each request."""

    def note_written(self, num_bytes: int) -> None:
        """See `ContentWatch`."""

    @property
    def _is_stuck(self) -> bool:
        """Whether a call has been running for so long that further requests would wait in vain."""
        return self._thread.busy_s >= self._timeout_s

    def _forget(self, forgotten: _Forgotten) -> None:
        """Have the connector drop keys, in its thread."""
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
        """Have the connector look up a request, in its thread."""
        question = self._waiting.get(key)
        if question is None or question.number != number:
            return  # nobody waits for the result
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
        """Call the connector in its thread, after earlier calls."""
        if self._thread.num_queued < MAX_QUEUED_CALLS:
            self._thread.submit(partial(self._call, method, body))
        else:
            self._log.warning("KV connector %s: does not return from its calls, %s is omitted", self._name, method)

    def _call(self, method: str, body: Callable[[], int | None], consequence: str = "ignored") -> int | None:
        try:
            return body()
        except Exception as error:  # user code may raise anything
            self._log.warning(
                "KV connector %s: %s failed, %s: %s: %s", self._name, method, consequence, type(error).__name__, error
            )
            return None
