"""`Timeline`: the durations of an engine's start-up phases, for its log."""

import time

from octavo.protocol.control import PhaseDone


class Timeline:
    """Duration of each start-up phase in each process."""

    def __init__(self) -> None:
        self.phases: list[PhaseDone] = []
        self._start = time.monotonic()

    def add(self, process: str, phase: str, seconds: float) -> None:
        """Record a phase."""
        self.phases.append(PhaseDone(process, phase, seconds))

    def render(self) -> str:
        """Return the timeline as a small table, in order of completion."""
        total = time.monotonic() - self._start
        width = max((len(f"{done.process}: {done.phase}") for done in self.phases), default=0)
        rows = [f"  {f'{done.process}: {done.phase}':<{width}} {done.seconds:7.2f} s" for done in self.phases]
        return "\n".join([f"start-up took {total:.2f} s (processes start in parallel):", *rows])
