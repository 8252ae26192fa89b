"""`python -m octavo.kernels.native`: builds and loads the library, and prints one line of JSON about it.

`octavo build-kernels` runs it. Needs no torch. Ends with code 1 when there is no library; the line then says why.
"""

import argparse
import json
import sys
from pathlib import Path

from octavo.kernels.native.build import NativeUnavailable, Toolchain
from octavo.kernels.native.library import build_and_load


def main() -> int:
    """Build what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser("python -m octavo.kernels.native", description=__doc__)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--compiler")
    parser.add_argument("--isa")
    options = parser.parse_args()
    try:
        built, library = build_and_load(Toolchain(options.cache, options.compiler), options.isa)
    except NativeUnavailable as error:
        print(json.dumps({"reason": error.reason, "hint": error.hint, "details": error.details}))  # noqa: T201
        return 1
    facts = {"path": str(built.path), "isa": library.isa, "compiler": built.compiler, "seconds": built.seconds}
    print(json.dumps(facts))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
