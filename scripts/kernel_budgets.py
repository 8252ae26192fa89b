"""Writes kernels/budgets.json: registers, spills and shared memory of every GPU kernel, compiled on this machine.

A test compares that file with the sources. Regenerate it only for an intended change.
"""

import argparse
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "kernels" / "budgets.json"


def main() -> None:
    """Compile the kernels, and write or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--print",
        action="store_true",
        help="write nothing; print Triton's version, then a line of JSON for each kernel as soon as it is compiled",
    )
    parser.add_argument("--only", type=int, help="with --print: compile for this compute capability alone, such as 90")
    arguments = parser.parse_args()
    if arguments.only and not arguments.print:
        parser.error("--only needs --print: the table has all compute capabilities")
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".cache" / "octavo" / "triton"))
    sys.path += [str(ROOT / "tests" / "support"), str(ROOT / "scripts")]
    # Triton reads the environment when it is imported.
    import triton
    from compiled_kernels import measure
    from kernel_launches import LAUNCHES, ONLY_ON

    budgets = measure(LAUNCHES, ONLY_ON, [arguments.only] if arguments.only else None)
    if arguments.print:
        print(json.dumps(triton.__version__), flush=True)
        for row in budgets:
            print(json.dumps(row), flush=True)
    else:
        TABLE.write_text(json.dumps({"triton": triton.__version__, "kernels": dict(budgets)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
