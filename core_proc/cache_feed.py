"""`CacheFeed`: reports the cache contents and the load of this engine to frontends that choose between engines.

Costs almost nothing while no frontend watches. Updates are not queued for slow frontends: if a send fails, the watch
restarts with everything that is cached at that time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.core_proc.cache.changes import CacheChanges
from octavo.core_proc.cache.prefix import PrefixCache
from octavo.core_proc.outbox import Outbox
from octavo.protocol.buffers import Buffer
from octavo.protocol.events import CacheUpdate

INTERVAL_S = 0.05
"""Interval of updates in seconds. With 64 engines, a frontend spends 2 % of its time on updates at this interval."""

MAX_CONTENTS = 4096
"""Most blocks in one message at the start of a watch: half a millisecond of the step loop."""

RETRY_S = 1.0
"""Seconds between attempts to start the watch of a frontend that does not read."""


@dataclass(slots=True)
class _Watch:
    """The watch of one frontend."""

    number: int
    sequence: int = 0
    """Sequence number of the next update."""
    contents: list[bytes] | None = None
    """Keys that were cached when the watch started and were not sent yet. None if the watch has not started."""
    begin_s: float = 0.0
    """When the watch may start, if it has not."""


class CacheFeed:
    """Sends the changes of a prefix cache to the frontends that watch it."""

    def __init__(
        self, cache: PrefixCache, outbox: Outbox, num_live: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        self._num_live = num_live
        self._last_num_live = 0
        self._outbox = outbox
        self._clock = clock
        self._changes = CacheChanges(cache)
        self._watches: dict[bytes, _Watch] = {}
        self._next_update_s = 0.0

    @property
    def timeout_s(self) -> float | None:
        """Seconds until `flush` has work to do. None if it has none until something changes."""
        if not self._watches:
            return None
        due_s = [self._next_update_s] if self._has_news else []
        for watch in self._watches.values():
            if watch.contents is None:
                due_s.append(watch.begin_s)
            elif watch.contents:
                return 0.0
        return max(0.0, min(due_s) - self._clock()) if due_s else None

    def watch(self, client: bytes, number: int) -> None:
        """Send a frontend everything that is cached, and changes from now on. Number 0 ends its watch."""
        if not number:
            self._end([client])
            return
        if not self._watches:
            self._changes.begin()
        self._watches[client] = _Watch(number)

    def flush(self) -> None:
        """Send what is due: at most one message per frontend."""
        self._end([client for client in self._watches if not self._outbox.is_connected(client)])
        if not self._watches:
            return
        now = self._clock()
        stored, removed = b"", b""
        if is_due := self._has_news and now >= self._next_update_s:
            self._next_update_s = now + INTERVAL_S
            self._last_num_live = self._num_live()
            if self._changes.has_cleared:
                for watch in self._watches.values():
                    watch.contents, watch.begin_s = None, now
            stored, removed = self._changes.take()
        for client, watch in self._watches.items():
            if watch.contents is None and now >= watch.begin_s:
                watch.contents = self._changes.contents()
                self._send(client, watch, stored, removed, starts_over=True)
            elif watch.contents is not None and (is_due or watch.contents):
                self._send(client, watch, stored, removed)

    def _end(self, clients: Sequence[bytes]) -> None:
        """End the watches of some frontends. Changes are collected while at least one watch is left."""
        was_watched = bool(self._watches)
        for client in clients:
            self._watches.pop(client, None)
        if was_watched and not self._watches:
            self._changes.end()

    @property
    def _has_news(self) -> bool:
        return bool(self._changes) or self._num_live() != self._last_num_live

    def _send(self, client: bytes, watch: _Watch, stored: bytes, removed: bytes, *, starts_over: bool = False) -> None:
        """Send changes, and a part of the initial contents that this frontend has not received.

        Contents that were evicted meanwhile are skipped: their removal may already have been sent.
        """
        if watch.contents:
            part, watch.contents = watch.contents[:MAX_CONTENTS], watch.contents[MAX_CONTENTS:]
            stored += self._changes.short_hashes(
                [block_hash for block_hash in part if self._changes.is_stored(block_hash)]
            )
        update = CacheUpdate(
            epoch=self._outbox.epoch,
            watch=watch.number,
            sequence=watch.sequence,
            starts_over=starts_over,
            num_live=self._last_num_live,
            stored=Buffer(stored),
            removed=Buffer(removed),
            state_interval=self._changes.state_interval,
        )
        if self._outbox.send(client, update):
            watch.sequence += 1
        else:
            watch.contents, watch.begin_s = None, self._clock() + RETRY_S
