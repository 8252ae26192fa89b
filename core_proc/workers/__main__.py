"""Entry point of a node agent process."""

from octavo.core_proc.workers.agent import NodeAgent
from octavo.protocol.control import AgentSpec
from octavo.protocol.lifecycle import EXIT_OK, StartupReporter, StopSignal, run_child


def main(spec: AgentSpec, reporter: StartupReporter, stop: StopSignal) -> int:
    """Run the workers of this machine and return the exit code."""
    NodeAgent(spec, stop).run()
    return EXIT_OK


if __name__ == "__main__":
    run_child("Agent", AgentSpec, main)
