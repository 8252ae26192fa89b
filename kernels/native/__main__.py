"""`python -m octavo.kernels.native`: builds and loads the library, and prints one line of JSON about it.

`octavo build-kernels` runs it. Does not need torch. Exits with code 1 if there is no library; the line gives the
reason. With `--describe`, which `octavo collect-env` uses, it builds nothing and describes the machine.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from octavo.kernels.native.build import NativeUnavailable, Toolchain
from octavo.kernels.native.compilers import find_compilers
from octavo.kernels.native.isa import OTHER_LEVELS, X86_LEVELS, Processor
from octavo.kernels.native.library import build_and_load


def main() -> int:
    """Build what the command line requests; return the exit code."""
    parser = argparse.ArgumentParser("python -m octavo.kernels.native", description=__doc__)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--describe", action="store_true")
    parser.add_argument("--compiler")
    parser.add_argument("--isa")
    options = parser.parse_args()
    if options.describe:
        print(json.dumps(describe(options.compiler)))  # noqa: T201
        return 0
    try:
        built, library = build_and_load(Toolchain(options.cache, options.compiler), options.isa)
    except NativeUnavailable as error:
        print(json.dumps({"reason": error.reason, "hint": error.hint, "details": error.details}))  # noqa: T201
        return 1
    facts = {"path": str(built.path), "isa": library.isa, "compiler": built.compiler, "seconds": built.seconds}
    print(json.dumps(facts))  # noqa: T201
    return 0


def describe(compiler: str | None) -> dict[str, Any]:
    """Return the facts that decide what is built: the processor, its instruction set levels, the compilers."""
    processor = Processor.read()
    levels = processor.levels()
    known = X86_LEVELS if levels[0] in X86_LEVELS else OTHER_LEVELS
    return {
        "processor": f"{processor.machine}, {processor.model}",
        "levels": [level.name for level in levels],
        "missing": {level.name: sorted(level.needs - processor.features) for level in known if level not in levels},
        "compilers": [found.identity for found in find_compilers(compiler)],
    }


if __name__ == "__main__":
    sys.exit(main())
