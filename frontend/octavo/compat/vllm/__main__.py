"""`python -m octavo.compat.vllm script.py [ARG ...]`: runs a script whose `import vllm` imports octavo.

`-m module` runs a module instead.
"""

import os.path
import runpy
import sys

from octavo.compat.vllm.importer import VllmFinder


def main() -> None:
    """Run the script as `__main__`, with its own arguments and its folder first on `sys.path`, as Python does."""
    argv = sys.argv[1:]
    if not argv or argv[0] in ("-h", "--help") or argv == ["-m"]:
        print("usage: python -m octavo.compat.vllm [-m MODULE | SCRIPT] [ARG ...]", file=sys.stderr)  # noqa: T201
        raise SystemExit(0 if argv and argv[0] in ("-h", "--help") else 2)
    VllmFinder.install("vllm", is_first=True)
    if argv[0] == "-m":
        sys.argv = argv[1:]
        sys.path.insert(0, "")
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = argv
    sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
