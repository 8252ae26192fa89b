"""The real core process over stages without a model. Started by name, like `octavo.core_proc`."""

from octavo.core_proc.core import EngineCore
from octavo.protocol.control import CoreSpec
from octavo.protocol.lifecycle import run_child


def main(spec, reporter, stop) -> int:
    """Run the core until it is told to stop."""
    return EngineCore(spec, reporter, stop, worker_module="bench_pipeline_parts.stage_worker").run()


if __name__ == "__main__":
    run_child("Core", CoreSpec, main)
