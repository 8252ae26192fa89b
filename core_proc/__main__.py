"""Entry of a core process."""

from octavo.core_proc.core import EngineCore
from octavo.protocol.control import CoreSpec
from octavo.protocol.lifecycle import Reporter, StopSignal, run_child


def main(spec: CoreSpec, reporter: Reporter, stop: StopSignal) -> int:
    """Run an engine; returns the exit code."""
    return EngineCore(spec, reporter, stop).run()


if __name__ == "__main__":
    run_child("Core", CoreSpec, main)
