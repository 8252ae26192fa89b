"""`octavo collect-env`: prints the information about the machine that a bug report needs. Compiles nothing.

Values of variables that look like secrets are masked.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from octavo.frontend.cli.parser import CommandParser
from octavo.protocol.cores import num_usable_cores, usable_cores
from octavo.protocol.env import Env, named
from octavo.protocol.version import __version__

Section = dict[str, str]

VARIABLE_PREFIXES = (
    *("OCTAVO_", "HF_", "HUGGING", "TRANSFORMERS_", "TOKENIZERS_", "XDG_", "CXX", "LD_", "PYTHON"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "TORCH", "PYTORCH_", "CUDA_", "NVIDIA_", "TRITON_"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "LANG", "LC_ALL"),
)
"""Environment variables that octavo or its libraries read."""

MASK = "****"

_SECRET_NAME = re.compile(r"KEY|TOKEN(?!IZERS)|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"(hf_|sk-|ghp_|github_pat_|xox[a-z]-|AKIA|eyJ)\w{8,}|[0-9a-fA-F]{32,}|Bearer ")

COMMAND_TIMEOUT_S = 30.0


class _KernelFacts(msgspec.Struct):
    """Output of `python -m octavo.kernels.native --describe`."""

    processor: str
    levels: list[str]
    missing: dict[str, list[str]]
    compilers: list[str]


def parser() -> CommandParser:
    """Return the flags of `octavo collect-env`."""
    parser = CommandParser("octavo collect-env", "Print the facts about this machine that a bug report needs.")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    return parser


def run(argv: list[str]) -> int:
    """Print the report; return the exit code."""
    options = parser().parse(argv)
    sections = report()
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(sections)).decode())
        return 0
    for title, section in sections.items():
        print(f"{title}:")
        width = max((len(name) for name in section), default=0)
        for name, value in section.items():
            print(f"  {name:<{width}}  {value}")
    return 0


def report() -> dict[str, Section]:
    """Return all sections with their rows."""
    env = Env.read()
    return {
        "octavo": {"version": __version__, "cache": str(env.cache_dir), "sockets": str(env.runtime_dir)},
        "system": _system(),
        "processor": _processor(),
        "memory": _memory(),
        "GPU": _gpus(),
        "native kernels": _kernels(env),
        "packages": dict(_packages()),
        "environment": {name: mask(name, value) for name, value in named(*VARIABLE_PREFIXES).items()},
    }


def mask(name: str, value: str) -> str:
    """Return a variable's value, masked if it may be a secret."""
    if value and (_SECRET_NAME.search(name) or _SECRET_VALUE.search(value)):
        return MASK
    parts = urlsplit(value) if "://" in value else None
    if parts and "@" in parts.netloc:
        return value.replace(parts.netloc, f"{MASK}@{parts.netloc.rpartition('@')[2]}")
    return value


def _system() -> Section:
    try:
        release = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        release = ""
    return {
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})",
        "kernel": platform.platform(),
        "distribution": release or "unknown",
        "C library": " ".join(platform.libc_ver()) or "unknown",
    }


def _processor() -> Section:
    fields = _fields("/proc/cpuinfo")
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    telling = sorted(
        flag for flag in flags if flag.startswith(("avx", "amx", "fma", "f16c", "bmi", "sve", "asimd", "bf16"))
    )
    return {
        "model": fields.get("model name", platform.machine()),
        "processors": str(os.cpu_count()),
        "usable": f"{num_usable_cores()} cores; {len(usable_cores())} without a container's quota",
        "features": " ".join(telling) or "none that matter",
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
    }


def _memory() -> Section:
    fields = _fields("/proc/meminfo")
    limit = next(
        (
            text
            for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
            if (text := _read(path))
        ),
        "",
    )
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "total": fields.get("MemTotal", "unknown"),
        "available": fields.get("MemAvailable", "unknown"),
        "container limit": f"{int(limit) / 2**30:.1f} GiB" if limit.isdecimal() and int(limit) < 2**60 else "none",
        "huge pages": _read("/sys/kernel/mm/transparent_hugepage/enabled") or "unknown",
        "/dev/shm": f"{shared.free / 2**30:.1f} of {shared.total / 2**30:.1f} GiB free" if shared else "none",
    }


def _gpus() -> Section:
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total,driver_version,compute_cap", "--format=csv,noheader"]
    lines = _output(query).splitlines()
    return {f"GPU {line.partition(',')[0]}": line.partition(",")[2].strip() for line in lines} or {"GPUs": "none"}


def _kernels(env: Env) -> Section:
    """Return the instruction set level of the native kernels, the reason for it, and the compiled libraries."""
    command = [sys.executable, "-P", "-m", "octavo.kernels.native", "--cache", str(env.cache_dir), "--describe"]
    text = _output([*command, *(["--compiler", env.cxx] if env.cxx else [])])
    section: Section = {}
    if text:
        facts = msgspec.json.decode(text, type=_KernelFacts)
        section["level"] = f"{facts.levels[0]}, the best that this processor has; it runs {', '.join(facts.levels)}"
        for level, features in facts.missing.items():
            section[f"not {level}"] = f"the processor lacks {', '.join(features)}"
        section["compilers"] = "; ".join(facts.compilers) or "none: set CXX or install g++, clang or ziglang"
    else:
        section["level"] = "unknown: python -m octavo.kernels.native --describe failed"
    for name in ("native", "packed", "gguf", "models"):
        section[f"cached {name}"] = _size(env.cache_dir / name)
    return section


def _packages() -> Iterator[tuple[str, str]]:
    requirements = importlib.metadata.requires("octavo") or []
    for requirement in requirements:
        if "extra ==" in requirement:
            continue  # extras for tests and development
        name = re.split(r"[^\w.-]", requirement)[0]
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield name, "not installed"


def _size(folder: Path) -> str:
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    return f"{len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB" if sizes else "nothing"


def _fields(path: str) -> dict[str, str]:
    """Return the `name: value` lines of a file up to the first blank line."""
    pairs = (line.partition(":") for line in _read(path).partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _output(command: list[str]) -> str:
    """Return the output of a command; "" if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
