"""The program behind `scripts/replay`: shows whether this scheduler makes the same plans as the recorded one."""

import argparse
import sys
from pathlib import Path

import msgspec

from octavo.core_proc.recorder import read_recording, replay
from octavo.protocol.errors import ProtocolError
from octavo.protocol.steps import StepPlan

EXIT_DIFFERENT = 1
EXIT_UNREADABLE = 2


def main(arguments: list[str]) -> int:
    """Replay the file named on the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/replay", description="Replay a recording of the scheduler.")
    parser.add_argument("file", type=Path, help="written by octavo serve --record-steps FILE")
    path = parser.parse_args(arguments).file
    try:
        result = replay(read_recording(path))
    except (OSError, ProtocolError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_UNREADABLE
    if result.is_identical:
        sys.stdout.write(f"{result.num_plans} plans identical\n")
        return 0
    sys.stdout.write(f"plan {result.num_plans} differs\nrecorded: {_shown(result.recorded)}\n")
    sys.stdout.write(f"replayed: {_shown(result.replayed)}\n")
    return EXIT_DIFFERENT


def _shown(plan: StepPlan | None) -> str:
    return msgspec.json.encode(plan, enc_hook=list).decode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
