"""A user's connector on the virtual clock: slow, sometimes silent, and its store loses contents."""

import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.transfer.plugin import PluginConnector
from octavo.protocol.config.kv_transfer import ResolvedKVConnector
from octavo.protocol.kv_connector import (
    ConnectorRequest,
    KVConnectorBase,
    KVConnectorConfig,
    KVConnectorRole,
    content_key,
)
from simulation.files import SimulatedFiles
from simulation.world import Process

SHARE_FAILING = 0.02
"""Share of the calls that raise an error."""

SHARE_STUCK = 0.003
"""Share of the calls that take longer than an engine waits for them that does not wait for long."""

MAX_STUCK_STEPS = 300
"""The longest call, as a multiple of the typical duration of a step."""


class SimulatedConnector(KVConnectorBase):
    """The half in the core; simulated workers load and save. Contents are those of simulated files.

    Args:
        files: files of all ranks and engines.
        block_size: tokens of a block.
    """

    def __init__(self, files: SimulatedFiles, block_size: int) -> None:
        super().__init__(KVConnectorConfig({}, block_size, 1, -1), KVConnectorRole.SCHEDULER)
        self._files = files

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> int:
        """See `KVConnectorBase`."""
        self._may_fail()
        # What is promised here may be gone or damaged when it is loaded.
        known = {content_key("", key) for key in self._files.ranks[0]}
        size, num_found = self.config.block_size, 0
        first = num_computed_tokens // size
        for index, keys in enumerate(request.block_keys[first:], first):
            if not known.issuperset(keys):
                break
            if not request.state_keys or request.state_keys[index] in known:
                num_found = index + 1 - first
        return num_found * size

    def request_finished(self, request_id: str) -> None:
        """See `KVConnectorBase`."""
        self._may_fail()

    def forget(self, keys: Sequence[str]) -> None:
        """See `KVConnectorBase`."""
        self._may_fail()
        for rank in self._files.ranks:
            for key in [key for key in rank if content_key("", key) in keys]:
                del rank[key]

    def start_load_kv(self, blocks: Any) -> None:
        """See `KVConnectorBase`; simulated workers load."""

    def wait_for_load(self) -> list[str]:
        """See `KVConnectorBase`."""
        return []

    def save_kv(self, blocks: Any) -> None:
        """See `KVConnectorBase`; simulated workers save."""

    def wait_for_save(self) -> list[str]:
        """See `KVConnectorBase`."""
        return []

    def _may_fail(self) -> None:
        if self._files.rng.random() < SHARE_FAILING:
            raise RuntimeError("the store of this connector does not answer")


class SimulatedThread:
    """Runs calls one after another on the virtual clock; replaces `ConnectorThread`.

    Args:
        process: the core; its death ends the calls.
        rng: random numbers for their durations.
        scale: typical duration of a step, in seconds.
        timeout_s: for how long the engine waits for a call.
        on_event: called after each call.
    """

    def __init__(
        self, process: Process, rng: random.Random, scale: float, timeout_s: float, on_event: Callable[[], None]
    ) -> None:
        self._process = process
        self._rng = rng
        self._scale = scale
        self._speed = rng.choice([0.01, 0.1, 1.0])
        self._timeout_s = timeout_s
        self._on_event = on_event
        self._calls: deque[Callable[[], object]] = deque()
        self._started_s: float | None = None

    @property
    def num_queued(self) -> int:
        """See `CallThread`."""
        return len(self._calls)

    @property
    def busy_s(self) -> float:
        """See `CallThread`."""
        return 0.0 if self._started_s is None else self._process.world.now - self._started_s

    def submit(self, call: Callable[[], object]) -> None:
        """See `CallThread`."""
        self._calls.append(call)
        if self._started_s is None:
            self._begin()

    def close(self, timeout_s: float) -> bool:
        """See `CallThread`."""
        return False

    def _begin(self) -> None:
        call = self._calls.popleft()
        self._started_s = self._process.world.now
        delay = self._speed * self._scale * self._rng.choice([0.0, 0.1, 1.0, 10.0])
        if self._rng.random() < SHARE_STUCK:
            delay = min(1.5 * self._timeout_s, MAX_STUCK_STEPS * self._scale)
        self._process.after(delay, lambda: self._finish(call))

    def _finish(self, call: Callable[[], object]) -> None:
        call()
        self._started_s = None
        if self._calls:
            self._begin()
        self._on_event()


def open_simulated(
    process: Process,
    scheduler: Scheduler,
    setting: ResolvedKVConnector,
    files: SimulatedFiles,
    scale: float,
    timeout_s: float,
    on_event: Callable[[], None],
) -> PluginConnector:
    """Return the real `PluginConnector` of a simulated core."""
    plugin = SimulatedConnector(files, scheduler.cache.block_size)
    thread = SimulatedThread(process, files.rng, scale, timeout_s, on_event)
    clock = lambda: process.world.now  # noqa: E731
    return PluginConnector(plugin, scheduler, "", loads=setting.loads, timeout_s=timeout_s, clock=clock, thread=thread)


def close_simulated(connector: PluginConnector) -> None:
    """Free what the real one holds of the machine."""
    os.close(connector.fileno())
