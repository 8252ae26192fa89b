"""`octavo build-kernels`: compiles the native library before the first start.

The frontend must not import kernels, so a child process does the work: `python -m octavo.kernels.native`.
"""

import subprocess
import sys

import msgspec

from octavo.frontend.cli.parser import CommandParser
from octavo.protocol.env import Env
from octavo.protocol.errors import StartupError

_DESCRIPTION = """\
Compile the CPU kernels into the cache (OCTAVO_CACHE, default ~/.cache/octavo), where every start looks first.
Without --isa, the kernels are compiled for this machine's processor. With --isa, they run on every processor that
has those instructions; use it for images that run on machines without a compiler."""


class KernelsBuilt(msgspec.Struct, frozen=True):
    """Output of `python -m octavo.kernels.native` on success."""

    path: str
    isa: str
    compiler: str | None
    """Path of the compiler; `None` if the library was in the cache."""
    seconds: float


class KernelsFailed(msgspec.Struct, frozen=True):
    """Output of `python -m octavo.kernels.native` on failure."""

    reason: str
    hint: str
    details: str


def parser() -> CommandParser:
    """Return the flags of `octavo build-kernels`."""
    parser = CommandParser("octavo build-kernels", _DESCRIPTION)
    parser.add_argument(
        "--isa", metavar="LEVEL", help="avx512_bf16, avx512_vnni, avx512, avx2 or portable; default: native"
    )
    parser.add_argument("--compiler", metavar="PATH", help="default: CXX, else g++, clang++, c++ or ziglang")
    return parser


def run(argv: list[str]) -> int:
    """Build the library and report it; return the exit code.

    Raises:
        StartupError: no compiler can build it.
    """
    options = parser().parse(argv)
    env = Env.read()
    arguments = ["--cache", str(env.cache_dir)]
    if compiler := options.compiler or env.cxx:
        arguments += ["--compiler", compiler]
    if options.isa:
        arguments += ["--isa", options.isa]
    command = [sys.executable, "-P", "-m", "octavo.kernels.native", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode not in (0, 1):
        raise StartupError(f"the build failed with exit code {done.returncode}")
    if done.returncode:
        failed = msgspec.json.decode(done.stdout, type=KernelsFailed)
        print(failed.details, file=sys.stderr, end="")
        raise StartupError(failed.reason, hint=failed.hint)
    built = msgspec.json.decode(done.stdout, type=KernelsBuilt)
    how = f"compiled in {built.seconds:.1f} s by {built.compiler}" if built.compiler else "already there"
    print(f"{built.path}\n{built.isa}, {how}")
    return 0
