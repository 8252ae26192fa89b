"""The child's side of a session: loads an engine, then serves the parent's requests, one line of JSON each.

Runs in the engine's own Python, without octavo's packages: the standard library only.

    argument    the engine's options, a JSON object
    output      {"engine_pid": its first process}, then {"elapsed_s": ..., "output_tokens": [...]} for each input
    input       {"prompts": [[token id, ...], ...], "max_tokens": [...]}; its end is the end of the session
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

Generate = Callable[[list[list[int]], list[int]], list[int]]
"""(prompts, tokens to generate for each) -> number of tokens generated for each; one batch, greedy, ignoring EOS."""


def die_with_parent() -> None:
    """Have this process killed when its parent ends; for `preexec_fn`."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def claim_output() -> TextIO:
    """Return the stream that the parent reads; redirect standard output to the log from now on."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return replies


def run(load: Callable[[dict[str, Any]], tuple[Generate, int]]) -> None:
    """Serve this session until the input ends; `load` returns an engine and its first process's id."""
    replies = claim_output()
    generate, engine_pid = load(json.loads(sys.argv[1]))
    print(json.dumps({"engine_pid": engine_pid}), file=replies)
    for line in sys.stdin:
        job = json.loads(line)
        started = time.perf_counter()
        output_tokens = generate(job["prompts"], job["max_tokens"])
        reply = {"elapsed_s": time.perf_counter() - started, "output_tokens": output_tokens}
        print(json.dumps(reply), file=replies)
