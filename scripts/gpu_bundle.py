"""Put together what a machine with a GPU and without a network needs: the source tree, and wheels of what it lacks.

Downloads the wheels (Linux on x86-64, one version of Python) to build/gpu_wheels and writes build/gpu_bundle.tar.gz:
source tree, wheels, and GPU_START_HERE.md with the commands to run there and what to look at first. The machine brings
torch for CUDA, triton, transformers and what they need.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / "build" / "gpu_wheels"
ARCHIVE = ROOT / "build" / "gpu_bundle.tar.gz"
PAGE = "GPU_START_HERE.md"
MISSING = ("pyzmq", "msgspec", "gguf", "fastapi", "uvicorn", "httptools", "llguidance", "shtab", "xxhash")
"""Packages that octavo needs and such a machine lacks."""
TEST_TOOLS = ("pytest", "pluggy", "iniconfig", "pytest-xdist", "execnet", "hypothesis", "sortedcontainers")
"""Additional packages for the tests of the kernels."""
PRESENT = (
    *("torch", "numpy", "tokenizers", "transformers", "huggingface-hub", "safetensors", "jinja2"),
    *("uvloop", "cloudpickle", "prometheus-client", "pyyaml", "tqdm"),
)
"""Packages that octavo needs and such a machine has."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]
"""What wheels for the machine may be tagged with, by version of its C library; pip takes each for itself alone."""
LIMIT_BYTES = 64 << 20

_INSTALL = "python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site"
_PREPARE = (
    f"{_INSTALL} build/gpu_wheels/*.whl && python3 scripts/link_tree.py && "
    "export PYTHONPATH=$PWD/build/types:$PWD/scripts:/tmp/site"
)
FIRST_LOOK_COMMAND = (
    f"out=${{OUT:-$PWD}}; {_PREPARE} && "
    "python3 -P scripts/gpu_first_look.py --logs /tmp/first_look --json $out/gpu_first_look.json; "
    "status=$?; tar -czf $out/first_look_logs.tgz -C /tmp first_look; exit $status"
)
_PYTEST = "python3 -P -m pytest -q -p no:cacheprovider -W default --durations=10 tests/gpu"
TEST_COMMAND = f"{_PREPARE} && {_PYTEST} -n 12 --dist loadgroup -m 'not alone' && {_PYTEST} -m alone"
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
    download([f"{name}=={version(name)}" for name in (*MISSING, *TEST_TOOLS)], args.python)
    sizes = {path.name: path.stat().st_size for path in sorted(WHEELS.glob("*.whl"))}
    sources = [path for path in source_files() if path.is_file()]
    source_bytes = sum(path.stat().st_size for path in sources)
    print(summary(sizes, source_bytes))
    pack(ARCHIVE, [*sources, *WHEELS.glob("*.whl")])
    print(f"\nwrote {ARCHIVE.relative_to(ROOT)}")
    if source_bytes + sum(sizes.values()) > LIMIT_BYTES:
        raise SystemExit(f"that is more than {LIMIT_BYTES >> 20} MiB")


def download(requirements: Sequence[str], python: str) -> None:
    """Download the wheels, without their dependencies.

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


def pack(archive: Path, files: Sequence[Path]) -> None:
    """Write the archive: the files under their places in the source tree, and the page with the commands."""
    page = ROOT / "build" / PAGE
    page.write_text(start_here())
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(page, PAGE)
        for path in files:
            tar.add(path, str(path.relative_to(ROOT)))


def start_here() -> str:
    """Return the page with the commands, in the order in which they are worth their time."""
    return f"""# octavo on a GPU: start here

Run these in the root of the unpacked archive. Each writes its results to `$OUT`, or to the current folder.

## 1. The first look: seven minutes

```
{FIRST_LOOK_COMMAND}
```

Every cell is in `gpu_first_look.json` as soon as it is over. Look at these first:

1. `failed:` and `BITS DIFFER` below the table. A position whose bits differ is a bug that comes before all speed: run
   the tests of section 2.
2. `row counts of cuBLAS that agree`: 100 % for a weight means that cuBLAS multiplies it with every row count.
3. The profile of each decode. The kernels in the first lines are what to improve. If the kernels take much less time
   than the step, the GPU waits for the host.
4. The percentages of the ceilings, compared with the estimates in `docs/gpu-kernels.md`. Where they are far apart, the
   estimate is wrong, or the kernel is: look at its row of the profile.
5. `octavo, early`: the time of a layer whose kernels begin before the kernel ahead of them ends. If it is shorter, and
   no bits differ, run the tests of section 2 with `OCTAVO_EARLY_LAUNCH=1`.
6. `GPU idle under this load`, with the gaps between tokens: what the three processes add.

## 2. The tests of the kernels: four minutes

First `test_a_row_has_the_same_bits_in_every_tile` in `tests/gpu/test_linear_quantized.py`: products with 4-bit weights
join two chunks in batches of up to 32 rows, in an order of sums that no GPU has confirmed. Then all of them:

```
{TEST_COMMAND}
```

Each run ends with its number of compilations. Without a GPU 350 were counted, and 40 more for whole steps; processes
that compile the same kernel count it twice.

## 3. The benchmark: eight minutes

```
{BENCH_COMMAND}
```

Compare two runs with `scripts/bench_gpu.py --compare FILE`, which reads the files of 1 and 3.
"""


def summary(wheels: dict[str, int], source_bytes: int) -> str:
    """Return the list of what is carried, its size, and the commands."""
    total = source_bytes + sum(wheels.values())
    lines = [f"{size / 2**20:6.2f} MiB  {name}" for name, size in wheels.items()]
    lines.append(f"{source_bytes / 2**20:6.2f} MiB  the source tree")
    lines.append(f"{total / 2**20:6.2f} MiB  together, of {LIMIT_BYTES >> 20} MiB at most")
    lines += [
        "",
        f"Carry {ARCHIVE.relative_to(ROOT)} there, or the source tree and build/gpu_wheels, and run in its root",
    ]
    lines += [f"({PAGE} in the archive says what to look at first):"]
    lines += ["", "the first look", FIRST_LOOK_COMMAND, "", "the tests of the kernels", TEST_COMMAND]
    return "\n".join([*lines, "", "the benchmark", BENCH_COMMAND])


if __name__ == "__main__":
    main()
