"""Put together what a machine with a GPU and without a network needs: the source tree, and wheels of what it lacks.

Downloads the wheels (Linux on x86-64, one version of Python) to build/gpu_wheels, says how large all of it is, and
prints the commands that run the tests of kernels and the benchmark there. The machine brings torch for CUDA, triton,
transformers and what they need.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / "build" / "gpu_wheels"
MISSING = ("pyzmq", "msgspec", "gguf", "fastapi", "uvicorn", "httptools", "llguidance", "shtab")
"""What octavo needs and such a machine does not have."""
PRESENT = (
    *("torch", "numpy", "tokenizers", "transformers", "huggingface-hub", "safetensors", "jinja2"),
    *("uvloop", "cloudpickle", "prometheus-client", "pyyaml", "tqdm"),
)
"""What octavo needs and such a machine has."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]
"""What wheels for the machine may be tagged with, by version of its C library; pip takes each for itself alone."""
LIMIT_BYTES = 64 << 20

_INSTALL = "python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site"
_PREPARE = (
    f"{_INSTALL} build/gpu_wheels/*.whl && python3 scripts/link_tree.py && "
    "export PYTHONPATH=$PWD/build/types:$PWD/scripts:/tmp/site"
)
TEST_COMMAND = f"{_PREPARE} && python3 -P -m pytest -q -p no:cacheprovider -W default --durations=10 tests/gpu"
BENCH_COMMAND = (
    f"out=${{OUT:-$PWD}}; {_PREPARE} && "
    "python3 -P scripts/bench_gpu.py --logs /tmp/bench_gpu --json $out/bench_gpu.json; "
    "status=$?; tar -czf $out/logs.tgz -C /tmp/bench_gpu $(cd /tmp/bench_gpu && ls *.log); exit $status"
)


def main() -> None:
    """Download, check the size, print the commands."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_bundle", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--python", default="3.12", help="the machine's version of Python")
    args = parser.parse_args()
    shutil.rmtree(WHEELS, ignore_errors=True)
    download([f"{name}=={version(name)}" for name in MISSING], args.python)
    sizes = {path.name: path.stat().st_size for path in sorted(WHEELS.glob("*.whl"))}
    source_bytes = sum(path.stat().st_size for path in source_files() if path.is_file())
    print(summary(sizes, source_bytes))
    if source_bytes + sum(sizes.values()) > LIMIT_BYTES:
        raise SystemExit(f"that is more than {LIMIT_BYTES >> 20} MiB")


def download(requirements: Sequence[str], python: str) -> None:
    """Fetch the wheels themselves, not what they need.

    Raises:
        SystemExit: one of them has no wheel for that machine.
    """
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(WHEELS)]
    command += ["--python-version", python, "--implementation", "cp", *requirements]
    for platform in [*PLATFORMS, "manylinux2014_x86_64", "manylinux1_x86_64"]:
        command += ["--platform", platform]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit("not all wheels can be had; see above")


def source_files() -> list[Path]:
    """Return the files of the source tree, as git knows them or will."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if name]


def summary(wheels: dict[str, int], source_bytes: int) -> str:
    """Return the list of what is carried, its size, and the commands."""
    total = source_bytes + sum(wheels.values())
    lines = [f"{size / 2**20:6.2f} MiB  {name}" for name, size in wheels.items()]
    lines.append(f"{source_bytes / 2**20:6.2f} MiB  the source tree")
    lines.append(f"{total / 2**20:6.2f} MiB  together, of {LIMIT_BYTES >> 20} MiB at most")
    lines += ["", "Carry the source tree and build/gpu_wheels there, and run in its root:"]
    return "\n".join([*lines, "", "the tests of the kernels", TEST_COMMAND, "", "the benchmark", BENCH_COMMAND])


if __name__ == "__main__":
    main()
