"""Checks the C++ of the kernels in ways that take too long for every run of the tests.

    warnings   every installed compiler, at every instruction set, with warnings as errors
    address    tests/kernels with AddressSanitizer and UndefinedBehaviorSanitizer, at every instruction set
    thread     the pool, and tests/kernels at the highest instruction set, under ThreadSanitizer
    compilers  tests/kernels with each further compiler: clang++, ziglang

Without arguments all of them run, for hours. Arguments after -- go to pytest. Last run on 28 November 2026 (commit
4edd3238, Zen 4): `address` on all of tests/kernels at avx512_bf16, and at the other four levels on all but
test_paged_attention_native.py; `compilers` with ziglang at avx512_bf16 and portable. They found nothing.

    ./scripts/check_native address -- -k rms_norm
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from octavo.kernels.native.build import FLAGS, SOURCES, NativeUnavailable, Toolchain, build
from octavo.kernels.native.compilers import CompileError, find_compilers
from octavo.kernels.native.isa import Processor

ROOT = Path(__file__).resolve().parent.parent
SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1 -O1"
SANITIZE_THREADS = "-fsanitize=thread -fno-omit-frame-pointer -g1 -O1"
TSAN_OPTIONS = "ignore_noninstrumented_modules=1:die_after_fork=0"
"""The C library and torch synchronize in ways that the sanitizer cannot see."""
TIMEOUT_S = 1200.0


def main() -> int:
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    words, for_pytest = words[:end], words[end + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=", ".join(CHECKS))
    options = parser.parse_args(words)
    if unknown := set(options.checks) - CHECKS.keys():
        parser.error(f"unknown check {unknown.pop()}")
    failed = []
    for name in options.checks or CHECKS:
        print(f"==> {name}", flush=True)
        if not CHECKS[name](for_pytest):
            failed.append(name)
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    return 1 if failed else 0


def check_warnings(_: list[str]) -> bool:
    is_good = True
    for compiler in find_compilers(None):
        for level in Processor.read().levels():
            try:
                build(Toolchain(compiler=compiler.name, flags=("-Werror",)), level.name)
                print(f"{compiler.name}, {level.name}: no warnings", flush=True)
            except NativeUnavailable as error:
                print(error.details or error.reason)
                is_good = False
    return is_good


def check_address(for_pytest: list[str]) -> bool:
    levels = [level.name for level in Processor.read().levels()]
    # Python and torch keep memory until the process ends; this is not a leak of ours.
    options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return _test_sanitized("libasan.so", SANITIZE, levels, options, for_pytest)


def check_thread(for_pytest: list[str]) -> bool:
    sources = [ROOT / "tests/support/pool_stress.cpp", SOURCES / "native/pool.cpp", SOURCES / "native/program.cpp"]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "pool_stress"
        flags = [*FLAGS, "-fsanitize=thread", "-g1", f"-I{SOURCES}", *map(str, sources), "-o", str(program)]
        try:
            next(find_compilers("g++")).run(flags, TIMEOUT_S)
        except CompileError as error:
            print(error.output)
            return False
        environment = {**os.environ, "TSAN_OPTIONS": "die_after_fork=0"}
        if subprocess.run([program, "2000"], env=environment, check=False).returncode:
            return False
    options = {"TSAN_OPTIONS": TSAN_OPTIONS, "OMP_NUM_THREADS": "1"}
    # The code that threads share is the same at every level.
    return _test_sanitized("libtsan.so", SANITIZE_THREADS, [Processor.read().levels()[0].name], options, for_pytest)


def _path_of(library: str) -> str:
    """Return the path where g++ finds a library."""
    done = subprocess.run(["g++", f"-print-file-name={library}"], capture_output=True, text=True, check=True)
    return str(Path(done.stdout.strip()).resolve())


def _test_sanitized(
    runtime: str, flags: str, levels: list[str], options: dict[str, str], for_pytest: list[str]
) -> bool:
    """Run the kernels' tests with a sanitizer, preloading its runtime, which Python does not link."""
    for level in levels:  # before the runtime is preloaded: the compiler would run with it too
        build(Toolchain(compiler="g++", flags=tuple(flags.split())), level)
    # torch throws exceptions while it is imported: the runtime must find the function that it replaces.
    paths = [_path_of(name) for name in (runtime, "libstdc++.so")]
    environment = {
        "OCTAVO_TEST_FLAGS": flags,
        "OCTAVO_TEST_CXX": "g++",
        "OCTAVO_TEST_LEVELS": " ".join(levels),
        "LD_PRELOAD": ":".join(paths),
        **options,
    }
    # A sanitizer writes to descriptor 2 before it ends the process. If pytest captured it, the message would be lost.
    return _test(environment, ["--capture=sys", *for_pytest])


def check_compilers(for_pytest: list[str]) -> bool:
    _, *others = find_compilers(None)
    if not others:
        print("no further compiler is installed")
    passed = [_test({"OCTAVO_TEST_CXX": compiler.name}, for_pytest) for compiler in others]
    return all(passed)


def _test(environment: dict[str, str], for_pytest: list[str]) -> bool:
    """Run the kernels' tests; tests/kernels/conftest.py builds the library as the environment says."""
    limit = "test_time_limit_s=1800"  # code under a sanitizer is slow, and so is its compilation
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-o", limit, "tests/kernels", *for_pytest]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=False).returncode == 0


CHECKS: dict[str, Callable[[list[str]], bool]] = {
    "warnings": check_warnings,
    "address": check_address,
    "thread": check_thread,
    "compilers": check_compilers,
}

if __name__ == "__main__":
    sys.exit(main())
