"""The name under which `ps` and `top` show a process."""

import ctypes
import sys
from pathlib import Path

_PR_SET_NAME = 15
_MAX_NAME_BYTES = 15
_ARG_START, _ARG_END = 45, 46
"""Fields of /proc/PID/stat after the name: where the kernel reads the arguments shown by `ps`."""


def set_process_title(kind: str, name: str) -> None:
    """Show this process as `octavo KIND NAME` (Linux only). Call it before starting threads, which inherit the name.

    `top` and `ps -e` show at most 15 bytes; if the title is longer, the kind is abbreviated to its first letter.
    Arguments from `-m` on stay, because tools find processes by their module.
    """
    if sys.platform != "linux":
        return
    title = f"octavo {kind} {name}"
    short = title if len(title) <= _MAX_NAME_BYTES else f"octavo {kind[0]} {name}"
    ctypes.CDLL(None).prctl(_PR_SET_NAME, short.encode()[:_MAX_NAME_BYTES], 0, 0, 0)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, size = int(fields[_ARG_START]), int(fields[_ARG_END]) - int(fields[_ARG_START])
    kept = sys.orig_argv[sys.orig_argv.index("-m") :] if "-m" in sys.orig_argv else []
    arguments = "\0".join([title, *kept]).encode()
    # Python has copied its arguments. The kernel reads this memory, whose size cannot change.
    if start and len(arguments) < size:
        ctypes.memmove(start, arguments.ljust(size, b"\0"), size)
