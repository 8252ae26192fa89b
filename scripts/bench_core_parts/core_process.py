"""The real core process with a fake worker. Started by name, like `octavo.core_proc`."""

from octavo.core_proc.core import EngineCore
from octavo.protocol.control import CoreSpec
from octavo.protocol.lifecycle import run_child


def main(spec, reporter, stop) -> int:
    """Run the core until it is told to stop."""
    return EngineCore(spec, reporter, stop, worker_module="bench_core_parts.fake_worker").run()


if __name__ == "__main__":
    run_child("Core", CoreSpec, main)
