"""Log lines of every octavo process: who said it, when, how bad, what."""

import logging
import os
import sys


def configure_logging(process: str, level: str) -> None:
    """Send the log of this process to standard error, each line led by its name and pid.

    Args:
        process: "Frontend", "Core" or "Worker 0".
        level: DEBUG, INFO, WARNING or ERROR.
    """
    handler = logging.StreamHandler(sys.stderr)
    prefix = f"({process} pid={os.getpid()})"
    handler.setFormatter(logging.Formatter(f"{prefix} %(levelname)s %(asctime)s %(message)s", datefmt="%m-%d %H:%M:%S"))
    root = logging.getLogger("octavo")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(level)
