"""Finds which requests kill the process that computes them, by trials of fewer and fewer of them.

Knows requests by name alone, starts and ends nothing, and has no clock: whoever supervises the process tells it of
deaths and of progress, and obeys `allowed`.
"""

from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

Key = TypeVar("Key", bound=Hashable)

MAX_RETRIES = 2
"""Times that a request which kills the process is tried again, where it alone is to blame from the start."""

MIN_LONE_DEATHS = 2
"""Deaths with nothing else in flight before a request is guilty: a single one may be somebody's `kill -9`."""


class Suspicion(msgspec.Struct, Generic[Key]):
    """All that a search knows: what one process must leave to the next, so that it goes on there."""

    deaths: dict[Key, int] = {}
    """Deaths of which a suspect was in flight since it was last cleared, by suspect."""
    lone_deaths: dict[Key, int] = {}
    groups: list[list[Key]] = []
    """Trials to come, the present one first; empty while all may run."""


class Suspects(Generic[Key]):
    """The requests that were in flight when the process died, until they have got past that place.

    A request that kills does so again at the same place, so one that gets past it is innocent of that death. After a
    first death all go on as before. When a suspect is in flight at a second one, trials begin: the suspects are parted
    into groups, one group at a time is allowed to run, and nothing else beside it. A group that gets past its place is
    cleared; a group that kills is halved, and its halves wait behind the groups that are less suspicious. A request
    that dies alone is tried again at once, on a new process that computes nothing else, and is guilty after
    `MIN_LONE_DEATHS` such deaths and more than `MAX_RETRIES` deaths in all. A suspect that is not there, because
    whoever asks for it has not come back, is tried when it is.

    Each guilty request costs at most two deaths outside of trials, and within them one for each halving of those that
    were in flight with it, and two alone.
    """

    def __init__(self, known: Suspicion[Key] | None = None) -> None:
        state = known or Suspicion()
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
    def state(self) -> Suspicion[Key]:
        """What another search needs to go on from here."""
        return Suspicion(self._deaths, self._lone_deaths, self._groups)

    @property
    def allowed(self) -> frozenset[Key] | None:
        """The requests that may run now; None: all."""
        return frozenset(self._groups[0]) if self._groups else None

    def call_up(self, present: Container[Key]) -> frozenset[Key] | None:
        """Let the first group be tried of which anybody is there, and return who may run; None: all, as nobody is."""
        for index, group in enumerate(self._groups):
            if any(key in present for key in group):
                self._groups.insert(0, self._groups.pop(index))
                return self.allowed
        return None

    def is_to_be_tried(self, key: Key) -> bool:
        """Return whether a request is in any of the groups."""
        return any(key in group for group in self._groups)

    def blame(self, in_flight: Sequence[Key]) -> Key | None:
        """The process has died.

        Args:
            in_flight: the requests that it was computing.

        Returns:
            The request that is guilty, and no suspect any more: it must not run again.
        """
        common = [key for key in in_flight if key in self._deaths]
        for key in in_flight:
            self._deaths[key] = self._deaths.get(key, 0) + 1
        if len(in_flight) == 1:
            (lone,) = in_flight
            self._lone_deaths[lone] = self._lone_deaths.get(lone, 0) + 1
            if self._lone_deaths[lone] >= MIN_LONE_DEATHS and self._deaths[lone] > MAX_RETRIES:
                self.clear(in_flight)
                return lone
        to_be_tried = {key for group in self._groups for key in group}
        if not to_be_tried.isdisjoint(in_flight):
            self._judge_trial(in_flight)
        elif common:  # no trial is under way: of those who are to be tried nobody was there
            others = [key for key in self._deaths if key not in to_be_tried.union(common)]
            groups = [common, others] if len(in_flight) == 1 else [others, *_halves(common)]
            self._groups = _in_order(*groups, *self._groups)
        return None

    def clear(self, keys: Iterable[Key]) -> None:
        """These requests have got past where they were when the process died, or are over."""
        gone = set(keys)
        for key in gone:
            self._deaths.pop(key, None)
            self._lone_deaths.pop(key, None)
        left = [[key for key in group if key not in gone] for group in self._groups]
        self._groups = [group for group in left if group]

    def _judge_trial(self, in_flight: Sequence[Key]) -> None:
        """Halve the present group, unless others were in flight beside it, or nobody was."""
        current, *later = self._groups
        running, known = set(in_flight), {key for group in self._groups for key in group}
        if not running <= set(current):
            # A trial begins while steps of others are still in flight: they are tried later, and this group once more.
            strangers = [key for key in in_flight if key not in known]
            self._groups = _in_order(current, *later, strangers)
        elif len(running) == 1:
            # At once, on a process that has computed nothing else: if it dies again there is no doubt.
            self._groups = _in_order([*running], [key for key in current if key not in running], *later)
        elif running:
            idle = [key for key in current if key not in running]
            self._groups = _in_order(idle, *later, *_halves([key for key in current if key in running]))


def _in_order(*groups: list[Key]) -> list[list[Key]]:
    return [group for group in groups if group]


def _halves(keys: list[Key]) -> list[list[Key]]:
    middle = (len(keys) + 1) // 2
    return [keys[:middle], keys[middle:]]
