"""Instruction sets: the levels that the C++ sources know, and which of them this processor has.

Chooses compiler flags, reads `/proc/cpuinfo` and requests the AMX registers from Linux. Compiles nothing.
"""

import ctypes
import platform
from dataclasses import dataclass
from pathlib import Path

NATIVE = "native"
"""The level that uses everything this processor has."""


@dataclass(frozen=True, slots=True)
class Level:
    """An instruction set level that any machine can build the library for."""

    name: str
    flags: tuple[str, ...]
    """Compiler flags, known to g++ since 11 and clang since 12."""
    needs: frozenset[str]
    """Flags in `/proc/cpuinfo` that a processor needs to run this level."""


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AVX512_VNNI = _AVX512 | {"avx512_vnni"}
_AVX512_BF16 = _AVX512_VNNI | {"avx512_bf16"}
_AVX512_VNNI_FLAGS = ("-march=x86-64-v4", "-mavx512vnni")
_AVX512_BF16_FLAGS = (*_AVX512_VNNI_FLAGS, "-mavx512bf16")

X86_LEVELS = (
    Level(
        "amx_bf16",
        (*_AVX512_BF16_FLAGS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        _AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
    ),
    Level("avx512_bf16", _AVX512_BF16_FLAGS, _AVX512_BF16),
    Level("avx512_vnni", _AVX512_VNNI_FLAGS, _AVX512_VNNI),
    Level("avx512", ("-march=x86-64-v4",), _AVX512),
    Level("avx2", ("-march=x86-64-v3",), _AVX2),
    Level("portable", ("-march=x86-64",), frozenset()),
)
"""Best level first; a processor that runs one level runs all levels after it."""

OTHER_LEVELS = (Level("portable", (), frozenset()),)
"""Level of other processors: plain loops, which the compiler vectorizes, with NEON for example."""


@dataclass(frozen=True, slots=True)
class Processor:
    """The properties of this machine that decide which code it can run, and which code is best."""

    machine: str
    """Architecture: `x86_64`, `aarch64`, ..."""
    model: str
    """Vendor, family and model, as far as the system reports them."""
    features: frozenset[str]

    @classmethod
    def read(cls, root: Path = Path("/")) -> "Processor":
        """Read the first processor of `/proc/cpuinfo`; tests pass another `root`."""
        fields: dict[str, str] = {}
        try:
            text = (root / "proc/cpuinfo").read_text()
        except OSError:
            text = ""
        for line in text.partition("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
        names = ("vendor_id", "cpu family", "model", "model name", "CPU implementer", "CPU part", "CPU variant")
        model = ", ".join(fields[name] for name in names if name in fields) or platform.processor()
        features = frozenset((fields.get("flags") or fields.get("Features") or "").split())
        if "amx_tile" in features and not _may_use_tiles():
            features -= {feature for feature in features if feature.startswith("amx")}
        return cls(platform.machine(), model, features)

    def levels(self) -> list[Level]:
        """Return the levels that this processor can run, best first."""
        known = X86_LEVELS if self.machine in ("x86_64", "AMD64") else OTHER_LEVELS
        return [level for level in known if level.needs <= self.features]


def _may_use_tiles() -> bool:
    """Request the AMX tile registers from Linux, for this process; a sandbox or an old kernel may refuse."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)
