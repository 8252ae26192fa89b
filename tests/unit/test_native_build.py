"""The native library is built once, found again, and rebuilt when anything that it depends on has changed.

Built from a source of a few lines, so that a build takes a moment.
"""

import ctypes
import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import join

from octavo.kernels.native import build as build_module
from octavo.kernels.native import isa
from octavo.kernels.native.build import NativeUnavailable, Toolchain, build, is_intact
from octavo.kernels.native.compilers import Compiler
from octavo.kernels.native.isa import NATIVE, Processor
from octavo.kernels.native.library import choose_kernels, load

HEADER = "#pragma once\nconstexpr int kAnswer = 42;\n"
SOURCE = """
#include "deep/answer.h"
extern "C" const char* octavo_isa_level() { return "test"; }
extern "C" int octavo_answer() { return kAnswer; }
"""
OTHER_SOURCE = 'extern "C" int octavo_other() { return 1; }\n'


@pytest.fixture
def toolchain(tmp_path: Path) -> Toolchain:
    sources = tmp_path / "sources"
    (sources / "deep").mkdir(parents=True)
    (sources / "deep" / "answer.h").write_text(HEADER)
    (sources / "main.cpp").write_text(SOURCE)
    (sources / "deep" / "other.cpp").write_text(OTHER_SOURCE)
    return Toolchain(cache_dir=tmp_path / "cache", sources=sources)


def answer(toolchain: Toolchain) -> int:
    return load(toolchain=toolchain).function("answer", [], ctypes.c_int)()


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def test_built_once_and_found_again(toolchain: Toolchain) -> None:
    first = build(toolchain)
    assert first.compiler and first.seconds > 0 and is_intact(first.path)
    second = build(toolchain)
    assert second.path == first.path and second.compiler is None
    assert answer(toolchain) == 42


def test_phase_is_told_only_while_compiling(toolchain: Toolchain) -> None:
    phases = []

    @contextmanager
    def phase(name: str):
        phases.append(name)
        yield

    build(toolchain, phase=phase)
    build(toolchain, phase=phase)
    assert phases == ["compiling kernels"]


@pytest.mark.parametrize("changed", ["main.cpp", "deep/answer.h", "deep/other.cpp"])
def test_a_changed_file_makes_another_library(toolchain: Toolchain, changed: str) -> None:
    before = build(toolchain).path
    path = toolchain.sources / changed
    path.write_text(path.read_text() + "\n// another\n")
    after = build(toolchain)
    assert after.path != before and after.compiler


def test_only_what_changed_is_compiled_again(toolchain: Toolchain) -> None:
    build(toolchain)
    objects = {path: path.stat().st_ino for path in (toolchain.folder / "objects").iterdir()}
    (toolchain.sources / "deep" / "answer.h").write_text(HEADER.replace("42", "43"))
    assert answer(toolchain) == 43
    now = {path: path.stat().st_ino for path in (toolchain.folder / "objects").iterdir()}
    assert objects.items() < now.items() and len(now) == len(objects) + 1


def test_flags_and_levels_make_other_libraries(toolchain: Toolchain) -> None:
    flagged = Toolchain(toolchain.cache_dir, flags=("-DANOTHER",), sources=toolchain.sources)
    levels = [level.name for level in Processor.read().levels()]
    paths = {build(toolchain).path, build(flagged).path, *(build(toolchain, level).path for level in levels)}
    assert len(paths) == 2 + len(levels)


def test_a_damaged_library_is_built_again(toolchain: Toolchain) -> None:
    path = build(toolchain).path
    content = path.read_bytes()
    for damaged in (b"", content[: len(content) // 2], content[:-1], bytes(len(content)), content + b"\0"):
        path.write_bytes(damaged)
        again = build(toolchain)
        assert again.path == path and again.compiler and is_intact(path)


def test_a_library_that_does_not_load_is_built_again(toolchain: Toolchain, caplog) -> None:
    path = build(toolchain).path
    path.write_bytes(b"not a library")
    build_module._append_checksum(path)
    assert is_intact(path)
    with caplog.at_level(logging.WARNING, "octavo"):
        assert answer(toolchain) == 42
    assert "built again" in caplog.text


def test_two_processes_build_at_once(toolchain: Toolchain) -> None:
    code = (
        "import sys; from pathlib import Path; from octavo.kernels.native.build import Toolchain, build\n"
        "from octavo.kernels.native.library import load\n"
        "t = Toolchain(cache_dir=Path(sys.argv[1]), sources=Path(sys.argv[2]))\n"
        "built = build(t)\n"
        "assert load(toolchain=t).isa == 'test'\n"
        "print(built.path, built.compiler is not None)\n"
    )
    words = [sys.executable, "-P", "-c", code, str(toolchain.cache_dir), str(toolchain.sources)]
    starts = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [process.communicate(timeout=120)[0].split() for process in starts]
    assert all(process.returncode == 0 for process in starts)
    assert len({path for path, _ in outputs}) == 1
    assert [made for _, made in outputs].count("True") == 1, "the others wait and find it"
    assert not list(toolchain.folder.glob("build-*")), "nothing half made is left"


def test_a_lock_that_is_held_too_long_is_ignored(toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "LOCK_TIMEOUT_S", 0.2)
    toolchain.folder.mkdir(parents=True)
    with build_module._lock(toolchain.folder):
        done = threading.Event()
        thread = threading.Thread(target=lambda: (build(toolchain), done.set()))
        thread.start()
        assert done.wait(60)
        join(thread)


def test_waiting_for_another_build_is_logged_once(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build_module, "LOCK_TIMEOUT_S", 0.4)
    monkeypatch.setattr(build_module, "LOCK_TOLD_AFTER_S", 0.1)
    toolchain.folder.mkdir(parents=True)
    with caplog.at_level(logging.INFO, "octavo"), build_module._lock(toolchain.folder):
        assert not caplog.records
        with build_module._lock(toolchain.folder):
            pass
    (record,) = caplog.records
    assert "another process builds kernels" in record.message and str(toolchain.folder) in record.message


def test_errors_of_the_compiler_are_told(toolchain: Toolchain) -> None:
    (toolchain.sources / "main.cpp").write_text("int main( {")
    with pytest.raises(NativeUnavailable, match=r"main\.cpp:1:.*error") as caught:
        build(toolchain)
    assert "main.cpp:1" in caught.value.details and "ziglang" in caught.value.hint
    assert not list(toolchain.folder.glob("*.so"))


def test_a_compiler_that_hangs_is_ended(toolchain: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    slow = tmp_path / "slow"
    slow.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo slow 1 && exit\nsleep 60 & echo $! > {pid_file}; wait\n')
    slow.chmod(0o755)
    named = Toolchain(toolchain.cache_dir, str(slow), sources=toolchain.sources)
    level = Processor.read().levels()[-1].name
    for limit_s in (0.5, 5.0, 50.0):  # a busy machine may not have started its child in the first one
        monkeypatch.setattr(build_module, "COMPILE_TIMEOUT_S", limit_s)
        with pytest.raises(NativeUnavailable, match="not done after"):
            build(named, level)
        if pid := pid_file.exists() and pid_file.read_text().strip():
            break
    assert pid and _ends(int(pid)), "its children end with it"


@pytest.mark.parametrize("command", ["/no/such/compiler -O1", " ", 'g++ "'], ids=["missing", "blank", "open quote"])
def test_a_named_compiler_is_the_only_one(toolchain: Toolchain, command: str) -> None:
    named = Toolchain(toolchain.cache_dir, command, sources=toolchain.sources)
    with pytest.raises(NativeUnavailable, match="was not found") as caught:
        build(named)
    assert "CXX" in caught.value.hint


def test_a_user_without_a_home_may_name_another_place() -> None:
    program = (
        "import os, pwd\n"
        "os.environ.pop('HOME', None)\n"
        "def nobody(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = nobody\n"
        "import octavo.kernels.native.library"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True)


def test_a_named_compiler_may_have_arguments(toolchain: Toolchain) -> None:
    named = Toolchain(toolchain.cache_dir, "c++ -DSOMETHING", sources=toolchain.sources)
    built = build(named)
    assert built.compiler and built.compiler.endswith("-DSOMETHING")
    assert built.path != build(toolchain).path


def test_zig_spells_processors_in_its_own_way() -> None:
    zig, other = Compiler(("python", "-m", "ziglang", "c++"), "1"), Compiler(("g++",), "1")
    assert (
        zig.translate_flag("-march=x86-64-v4") == "-march=x86_64_v4"
        and zig.translate_flag("-march=x86-64") == "-march=x86_64"
    )
    assert (
        zig.translate_flag("-mavx512bf16") == "-mavx512bf16"
        and other.translate_flag("-march=x86-64-v4") == "-march=x86-64-v4"
    )


def test_without_a_compiler_the_error_says_what_to_install(toolchain: Toolchain, no_compiler: None) -> None:
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler") as caught:
        build(toolchain)
    assert "apt install g++" in caught.value.hint


@pytest.mark.parametrize("level", [None, "portable"])
def test_a_library_built_ahead_needs_no_compiler(
    toolchain: Toolchain, level: str | None, request: pytest.FixtureRequest
) -> None:
    ahead = build(toolchain, level)
    request.getfixturevalue("no_compiler")
    assert build(toolchain) == build_module.Built(ahead.path, None, 0.0)


def test_a_folder_that_cannot_be_created_is_reported(toolchain: Toolchain, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wrong = Toolchain(tmp_path / "file", sources=toolchain.sources)
    with pytest.raises(NativeUnavailable, match="cannot build kernels in") as caught:
        build(wrong)
    assert "OCTAVO_CACHE" in caught.value.hint


def test_an_instruction_set_that_is_not_here(toolchain: Toolchain) -> None:
    with pytest.raises(NativeUnavailable, match="does not have the instruction set 'avx1024'") as caught:
        build(toolchain, "avx1024")
    assert "portable" in caught.value.hint


def test_old_libraries_are_removed(toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "KEPT_LIBRARIES", 2)
    paths = []
    for number in range(3):
        paths.append(build(Toolchain(toolchain.cache_dir, flags=(f"-DN={number}",), sources=toolchain.sources)).path)
        os.utime(paths[-1], (number + 1e9, number + 1e9))
    abandoned = toolchain.folder / "build-abandoned"
    abandoned.mkdir()
    os.utime(abandoned, (0, 0))
    paths.append(build(toolchain).path)
    assert [path.exists() for path in paths] == [False, False, True, True]
    assert not abandoned.exists()


def test_auto_falls_back_and_says_why(toolchain: Toolchain, no_compiler: None, caplog) -> None:
    with caplog.at_level(logging.WARNING, "octavo"):
        assert choose_kernels("auto", toolchain=toolchain) is None
    assert "no C++ compiler" in caplog.text and "apt install g++" in caplog.text


def test_native_does_not_fall_back(toolchain: Toolchain, no_compiler: None) -> None:
    with pytest.raises(NativeUnavailable):
        choose_kernels("native", toolchain=toolchain)


def test_torch_builds_nothing(toolchain: Toolchain) -> None:
    assert choose_kernels("torch", toolchain=toolchain) is None
    assert not toolchain.folder.exists()


def test_chosen_library_is_loaded(toolchain: Toolchain) -> None:
    library = choose_kernels("auto", toolchain=toolchain)
    assert library is not None and library.isa == "test"
    assert library.path.name.startswith(NATIVE)


def test_levels_of_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc").mkdir()

    def levels(machine: str, flags: str) -> list[str]:
        (tmp_path / "proc/cpuinfo").write_text(f"model name : X\nflags : {flags}\n\nmodel name : Y\nflags : none\n")
        processor = Processor.read(tmp_path)
        return [level.name for level in Processor(machine, processor.model, processor.features).levels()]

    avx2 = "sse4_2 avx2 fma f16c bmi1 bmi2 movbe abm"
    avx512 = f"{avx2} avx512f avx512bw avx512cd avx512dq avx512vl"
    assert levels("x86_64", "sse2") == ["portable"]
    assert levels("x86_64", avx2) == ["avx2", "portable"]
    assert levels("x86_64", avx512) == ["avx512", "avx2", "portable"]
    lower = ["avx512", "avx2", "portable"]
    assert levels("x86_64", f"{avx512} avx512_vnni") == ["avx512_vnni", *lower]
    assert levels("x86_64", f"{avx512} avx512_bf16 avx512_vnni") == ["avx512_bf16", "avx512_vnni", *lower]
    assert levels("aarch64", "asimd") == ["portable"]
    amx = f"{avx512} avx512_bf16 avx512_vnni amx_tile amx_bf16 amx_int8"
    monkeypatch.setattr(isa, "_may_use_tiles", lambda: True)
    assert levels("x86_64", amx) == ["amx_bf16", "avx512_bf16", "avx512_vnni", *lower]
    monkeypatch.setattr(isa, "_may_use_tiles", lambda: False)
    assert levels("x86_64", amx) == ["avx512_bf16", "avx512_vnni", *lower], "Linux refuses"


def test_building_loads_no_torch() -> None:
    code = "import sys, octavo.kernels.native.library; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def _ends(pid: int, within_s: float = 30) -> bool:
    """Whether a process is gone soon: a killed one that nobody waits for dies when the kernel gets to it."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.01)
    return False
