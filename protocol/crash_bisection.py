"""Finds the requests that crash the process computing them, by running ever smaller groups of them in isolation.

Knows requests only by key, starts and stops nothing, and reads no clock. The supervisor of the process reports crashes
and progress, and runs only the requests in `allowed`.
"""

from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

Key = TypeVar("Key", bound=Hashable)

MAX_RETRIES = 2
"""Number of retries of a request that was the only one in flight at every crash."""

MIN_LONE_DEATHS = 2
"""Number of crashes with nothing else in flight before a request is guilty. A single one may be an operator's `kill
-9`."""


class BisectionState(msgspec.Struct, Generic[Key]):
    """The state of a search. A process saves it so that its successor can continue."""

    deaths: dict[Key, int] = {}
    """For each suspect, the number of crashes during which it was in flight, since it was last cleared."""
    lone_deaths: dict[Key, int] = {}
    groups: list[list[Key]] = []
    """Groups to run in isolation, the current one first. Empty while every request may run."""


class CrashBisection(Generic[Key]):
    """Requests that were in flight when the process crashed, until they have passed that point.

    A request that crashes the process does so again at the same point. A request that passes this point is cleared of
    that crash. After the first crash every request continues as before. If a suspect is in flight at a second crash,
    bisection begins: the suspects are divided into groups, and one group at a time runs in isolation. A group that
    passes its point is cleared. A group that crashes is halved, and its halves queue behind less suspicious groups. A
    request that crashes alone is retried at once in a new process that computes nothing else. It is guilty after
    `MIN_LONE_DEATHS` such crashes and more than `MAX_RETRIES` crashes in total. A suspect whose frontend has not
    reconnected yet is isolated once it has.

    Each guilty request costs at most two crashes outside of isolation. Within isolation it costs one crash per halving
    of the requests that were in flight with it, and two alone.
    """

    def __init__(self, known: BisectionState[Key] | None = None) -> None:
        state = known or BisectionState()
        self._deaths = dict(state.deaths)
        self._lone_deaths = dict(state.lone_deaths)
        self._groups = [list(group) for group in state.groups]

    def __bool__(self) -> bool:
        return bool(self._deaths)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._deaths)

    def __contains__(self, key: object) -> bool:
        return key in self._deaths

    @property
    def state(self) -> BisectionState[Key]:
        """The state that a successor needs to continue this search."""
        return BisectionState(self._deaths, self._lone_deaths, self._groups)

    @property
    def allowed(self) -> frozenset[Key] | None:
        """The requests that may run now. None if all may."""
        return frozenset(self._groups[0]) if self._groups else None

    def select_group(self, present: Container[Key]) -> frozenset[Key] | None:
        """Make the first group with a present member the current one and return it. Return None if no group has one."""
        for index, group in enumerate(self._groups):
            if any(key in present for key in group):
                self._groups.insert(0, self._groups.pop(index))
                return self.allowed
        return None

    def is_isolated(self, key: Key) -> bool:
        """Return whether a request is in any group."""
        return any(key in group for group in self._groups)

    def record_crash(self, in_flight: Sequence[Key], *, is_alone: bool = True) -> Key | None:
        """Record a crash of the process.

        Args:
            in_flight: the requests that it was computing.
            is_alone: False if it may also have computed requests that this search does not know.

        Returns:
            The guilty request, if one is found. It is no longer a suspect and must not run again.
        """
        common = [key for key in in_flight if key in self._deaths]
        for key in in_flight:
            self._deaths[key] = self._deaths.get(key, 0) + 1
        if len(in_flight) == 1 and is_alone:
            (lone,) = in_flight
            self._lone_deaths[lone] = self._lone_deaths.get(lone, 0) + 1
            if self._lone_deaths[lone] >= MIN_LONE_DEATHS and self._deaths[lone] > MAX_RETRIES:
                self.clear(in_flight)
                return lone
        isolated = {key for group in self._groups for key in group}
        if not isolated.isdisjoint(in_flight):
            self._split_group(in_flight)
        elif common:  # no group was running: none of its members were in flight
            others = [key for key in self._deaths if key not in isolated.union(common)]
            groups = [common, others] if len(in_flight) == 1 else [others, *_halves(common)]
            self._groups = _in_order(*groups, *self._groups)
        return None

    def clear(self, keys: Iterable[Key]) -> None:
        """Clear requests that have passed the point of the crash, or have ended."""
        gone = set(keys)
        for key in gone:
            self._deaths.pop(key, None)
            self._lone_deaths.pop(key, None)
        left = [[key for key in group if key not in gone] for group in self._groups]
        self._groups = [group for group in left if group]

    def _split_group(self, in_flight: Sequence[Key]) -> None:
        """Halve the current group, unless other requests were in flight too, or none of its members was."""
        current, *later = self._groups
        running, known = set(in_flight), {key for group in self._groups for key in group}
        if not running <= set(current):
            # Steps of other requests were still in flight: those are isolated later, and this group runs again.
            strangers = [key for key in in_flight if key not in known]
            self._groups = _in_order(current, *later, strangers)
        elif len(running) == 1:
            # Retry at once in a new process that has computed nothing else: a second crash is conclusive.
            self._groups = _in_order([*running], [key for key in current if key not in running], *later)
        elif running:
            idle = [key for key in current if key not in running]
            self._groups = _in_order(idle, *later, *_halves([key for key in current if key in running]))


def _in_order(*groups: list[Key]) -> list[list[Key]]:
    return [group for group in groups if group]


def _halves(keys: list[Key]) -> list[list[Key]]:
    middle = (len(keys) + 1) // 2
    return [keys[:middle], keys[middle:]]
