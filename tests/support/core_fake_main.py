"""The real core process over fake workers. Started by name, as `octavo.core_proc` is."""

from octavo.core_proc.core import EngineCore
from octavo.protocol.control import CoreSpec
from octavo.protocol.lifecycle import StartupReporter, StopSignal, run_child


def main(spec: CoreSpec, reporter: StartupReporter, stop: StopSignal) -> int:
    return EngineCore(spec, reporter, stop, worker_module="core_fake_worker").run()


if __name__ == "__main__":
    run_child("Core", CoreSpec, main)
