"""The progress bar of a start: how much of the weights has been read. Shown on terminals only."""

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tqdm import tqdm


class LoadBar:
    """Draws the progress that engines report while they start. With several engines, it shows the most advanced one."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._is_visible = sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def __call__(self, phase: str, fraction: float | None) -> None:
        """Show the progress of a phase, from 0 to 1. `None`: the phase has just begun, and the previous bar ends."""
        if not self._is_visible:
            return
        if fraction is None:
            self._close()
            return
        if self._bar is None:
            from tqdm import tqdm  # imported here: most servers have no terminal and need no bar

            self._bar = tqdm(total=100, desc=phase, unit="%", bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}")
        self._bar.update(max(0.0, 100 * fraction - self._bar.n))

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
