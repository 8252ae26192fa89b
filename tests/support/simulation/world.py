"""The virtual clock, processes that can be stopped and killed, and connections that delay and lose messages.

One heap of events: everything happens in an event, and nothing else takes time. Knows nothing about engines.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable

from octavo.protocol.codec import Frame

Action = Callable[[], None]


class SimulationStuck(AssertionError):
    """The run does not terminate."""


class World:
    """The clock and the queue of events."""

    def __init__(self, max_events: int) -> None:
        self.now = 0.0
        self.num_events = 0
        self.current: Process | None = None
        """The process that acts at the moment."""
        self._max_events = max_events
        self._events: list[tuple[float, int, Action]] = []
        self._num_scheduled = 0

    def at(self, time: float, action: Action) -> None:
        """Schedule an action; actions at the same time run in the order in which they were scheduled."""
        self._num_scheduled += 1
        heapq.heappush(self._events, (max(time, self.now), self._num_scheduled, action))

    def after(self, delay: float, action: Action) -> None:
        """Schedule an action after a delay."""
        self.at(self.now + delay, action)

    def soon(self, action: Action) -> None:
        """Let the current process act once more, as a callback of its event loop does."""
        (self.current or self).after(0.0, action)

    def run(self) -> None:
        """Run all events until none is left.

        Raises:
            SimulationStuck: there are too many.
        """
        events = self._events
        while events:
            self.now, _, action = heapq.heappop(events)
            self.num_events += 1
            if self.num_events > self._max_events:
                raise SimulationStuck(f"no end after {self.num_events} events, at {self.now:.3f} s")
            action()


class Process:
    """A process that acts until it is killed, except while it is stopped."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_alive = True
        self.stopped_until = 0.0
        """When it resumes, or resumed, after the latest stop."""

    def stop(self, duration: float) -> None:
        """Act as on SIGSTOP, and SIGCONT after `duration`."""
        self.stopped_until = max(self.stopped_until, self.world.now + duration)

    def kill(self) -> None:
        """Act as on SIGKILL."""
        self.is_alive = False

    def after(self, delay: float, action: Action) -> None:
        """Act after a delay, or when the process is resumed."""
        self.world.at(max(self.world.now + delay, self.stopped_until), lambda: self._act(action))

    def _act(self, action: Action) -> None:
        if not self.is_alive:
            return
        if self.world.now < self.stopped_until:
            self.world.at(self.stopped_until, lambda: self._act(action))
            return
        world = self.world
        world.current, before = self, world.current
        action()
        world.current = before


class Pipe:
    """One direction of a connection: messages arrive in order, each after its own delay, until it is cut.

    Args:
        world: the clock.
        rng: draws the delays.
        scale: typical delay, in seconds.
        limit: messages that it holds.
        on_arrival: called for each message that has arrived; `take` returns it.
    """

    def __init__(self, world: World, rng: random.Random, scale: float, limit: int, on_arrival: Action) -> None:
        self.is_cut = False
        self._world = world
        self._rng = rng
        self._scale = scale
        self._limit = limit
        self._on_arrival = on_arrival
        self._under_way: deque[list[Frame]] = deque()
        self._arrived: deque[list[Frame]] = deque()
        self.latest = 0.0
        """When everything that was sent will have arrived."""

    @property
    def has_arrived(self) -> bool:
        """True when `take` returns something."""
        return bool(self._arrived)

    def send(self, message: list[Frame]) -> bool:
        """Send a message; False when the pipe is full. After the cut it is lost."""
        if len(self._under_way) + len(self._arrived) >= self._limit:
            return False
        if self.is_cut:
            return True
        self.latest = max(self.latest, self._world.now + self._delay())
        self._under_way.append(message)
        self._world.at(self.latest, self._arrive)
        return True

    def take(self) -> list[Frame] | None:
        """Return the next message that has arrived."""
        return self._arrived.popleft() if self._arrived else None

    def cut(self) -> None:
        """Drop the messages in transit and all later ones."""
        self.is_cut = True
        self._under_way.clear()

    def _delay(self) -> float:
        return self._scale * self._rng.expovariate(1.0) if self._scale else 0.0

    def _arrive(self) -> None:
        if self._under_way:
            self._arrived.append(self._under_way.popleft())
            self._on_arrival()
