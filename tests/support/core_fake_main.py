"""The real core process over fake workers. Started by name, like `octavo.core_proc`.

Signals end the time limit of the step in progress, so that no test depends on a real time limit. SIGUSR1 ends it now.
SIGUSR2 makes it end long ago, as if this process had been suspended meanwhile.
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
