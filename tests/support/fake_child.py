"""A child process for supervision tests: `python -P -m fake_child`, told what to do by `CoreSpec.address`."""

import os
import select
import signal
import subprocess
import sys
import time

from octavo.protocol.config import CachePlan
from octavo.protocol.control import CoreReady, CoreSpec
from octavo.protocol.errors import ConfigError
from octavo.protocol.lifecycle import StartupReporter, StopSignal, run_child

STOPS = "FAKE_CHILD_STOPS"
"""The environment variable by which a child stops (SIGSTOP) before it is ready, whatever its behaviour."""

READY = CoreReady(CachePlan(blocks_per_group=[1], block_size=1, max_model_len=1, kv_cache_bytes=1))


def main(spec: CoreSpec, reporter: StartupReporter, stop: StopSignal) -> int:
    behaviour = spec.address
    with reporter.phase("first phase"):
        pass
    if os.environ.get(STOPS):
        os.kill(os.getpid(), signal.SIGSTOP)
    if behaviour == "fail":
        with reporter.phase("second phase"):
            raise ConfigError("the model is upside down", hint="turn it round")
    if behaviour == "crash":
        with reporter.phase("second phase"):
            raise ZeroDivisionError("oops")
    if behaviour == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "parent":
        subprocess.Popen(["sleep", "60"])
    reporter.mark_ready(READY)
    if behaviour == "crash later":
        raise ZeroDivisionError("oops")
    if behaviour == "ignore sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deadline = time.monotonic() + 30
    while stop.count < 2 and time.monotonic() < deadline:
        select.select([stop], [], [], 30)
        stop.acknowledge()
    return 7


if __name__ == "__main__":
    run_child("Fake", CoreSpec, main)
    sys.exit("unreachable")
