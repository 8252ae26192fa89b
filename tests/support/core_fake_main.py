"""The real core process over fake workers. Started by name, as `octavo.core_proc` is.

A signal ends the time limit of the step that is computed, so that no test has to choose a limit that only a hung worker
exceeds: SIGUSR1 at once, SIGUSR2 as if it had ended long ago, while this process was suspended.
"""

import signal
import time
from functools import partial
from typing import Any

from octavo.core_proc.core import EngineCore
from octavo.protocol.control import CoreSpec
from octavo.protocol.lifecycle import StartupReporter, StopSignal, run_child


def end_time_limit(core: EngineCore, number: int, frame: Any) -> None:
    supervisor = core._supervisor
    if supervisor is not None and supervisor.is_ready and supervisor._due_s is not None:
        supervisor._due_s = time.monotonic() - (100.0 if number == signal.SIGUSR2 else 0.0)


def main(spec: CoreSpec, reporter: StartupReporter, stop: StopSignal) -> int:
    core = EngineCore(spec, reporter, stop, worker_module="core_fake_worker")
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, partial(end_time_limit, core))
    return core.run()


if __name__ == "__main__":
    run_child("Core", CoreSpec, main)
