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
    parser.add_argument("--print", action="store_true", help="print the table instead of writing it")
    arguments = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".cache" / "octavo" / "triton"))
    sys.path += [str(ROOT / "tests" / "support"), str(ROOT / "scripts")]
    # Triton reads the environment when it is imported.
    import triton
    from compiled_kernels import measure
    from kernel_launches import LAUNCHES, ONLY_ON

    text = json.dumps({"triton": triton.__version__, "kernels": measure(LAUNCHES, ONLY_ON)}, indent=1) + "\n"
    if arguments.print:
        print(text, end="")
    else:
        TABLE.write_text(text)


if __name__ == "__main__":
    main()
