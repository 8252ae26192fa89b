"""Routes uvicorn's log into ours: its warnings, and one line per response."""

import logging
from collections.abc import Iterable


def route_log(silent_paths: Iterable[str] = ()) -> None:
    """Send uvicorn's log to ours. Only warnings of its own messages pass: octavo logs start and shutdown itself.

    Args:
        silent_paths: paths whose responses are not logged; an item may hold several paths, separated by commas.
    """
    ours = logging.getLogger("octavo")
    for name, level in (("uvicorn.error", logging.WARNING), ("uvicorn.access", logging.INFO)):
        theirs = logging.getLogger(name)
        theirs.handlers[:] = ours.handlers
        theirs.propagate = ours.propagate
        theirs.setLevel(max(level, ours.getEffectiveLevel()))
    paths = frozenset(path.strip() for text in silent_paths for path in text.split(","))
    logging.getLogger("uvicorn.access").filters[:] = [_PathFilter(paths)] if paths else []


class _PathFilter(logging.Filter):
    """Drops the access log lines of some paths."""

    def __init__(self, paths: frozenset[str]) -> None:
        super().__init__()
        self._paths = paths

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a line. Its arguments are client, method, path with query, HTTP version and status."""
        assert isinstance(record.args, tuple)
        return str(record.args[2]).partition("?")[0] not in self._paths
