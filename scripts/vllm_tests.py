"""Runs vLLM's own server tests, unchanged, against `octavo serve`, and prints how many pass, by file.

The tests are fetched with vLLM's source. Their `RemoteOpenAIServer` is replaced by one that starts octavo. Every model
that they name is SmolLM2-135M-Instruct in bfloat16, so the answers of larger models are not tested.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import fetch_embedding_model
import fetch_vllm_source
from make_bf16_checkpoint import make
from vllm_tests_parts import LEFT_OUT
from vllm_tests_parts.files import ADAPTERS, DESELECTED, EMBEDDING_MODELS, FILES, MODELS

from octavo.protocol.env import Env

PARTS = Path(__file__).parent / "vllm_tests_parts"
PACKAGES = (("--no-deps", "pytest-asyncio>=1.0"), ("jsonschema>=4", "pybase64>=1"))
"""Arguments of pip; the first package needs pytest, which is already installed."""
GENERATION = "generation_config.json"
MAX_ANSWER_TOKENS = 128
"""Token limit of requests that set none."""


def main() -> int:
    """Run the files named on the command line, or all; return 1 if a test fails that is not a known failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="below tests/entrypoints/; default: those that pass")
    parser.add_argument("--keyword", "-k", default="", help="run tests whose names match, as in pytest")
    parser.add_argument("--log", type=Path, metavar="DIRECTORY", help="keep pytest's output of each file there")
    parser.add_argument(
        "--all",
        action="store_true",
        help="run the tests that are left out as well",
    )
    options = parser.parse_args()
    source, environment = fetch_vllm_source.fetch(), dict(os.environ)
    with tempfile.TemporaryDirectory() as scratch:
        environment |= {
            "HF_HOME": str(_hub(Path(scratch))),
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(PARTS.parent), str(_packages())]),
            "OCTAVO_LOG_LEVEL": "WARNING",
        }
        totals: Counter[str] = Counter()
        for file in options.files or FILES:
            counts = _run(source, file, environment, options, Path(scratch))
            totals += counts
            print(f"| `{file}` | {_shown(counts)} |", flush=True)
    print(f"| all | {_shown(totals)} |")
    return 1 if totals["failed"] else 0


def _run(
    source: Path, file: str, environment: dict[str, str], options: argparse.Namespace, scratch: Path
) -> Counter[str]:
    report = scratch / "report.xml"
    report.unlink(missing_ok=True)
    left_out = [] if options.all else [name for name in DESELECTED if name.startswith(file)]
    pytest = [sys.executable, "-P", "-m", "pytest", "-q", "--tb=short", f"--junitxml={report}"]
    pytest += ["-c", os.devnull, f"--rootdir={source}", f"--confcutdir={source}/tests/entrypoints"]
    pytest += ["-p", "vllm_tests_parts.plugin", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:schemathesis"]
    pytest += ["-o", "asyncio_mode=auto"]
    pytest += ["-k", options.keyword] if options.keyword else []
    done = subprocess.run(
        [*pytest, f"tests/entrypoints/{file}"],
        cwd=source,
        env={**environment, LEFT_OUT: "\n".join(left_out)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if options.log:
        options.log.mkdir(parents=True, exist_ok=True)
        (options.log / (file.replace("/", "_") + ".log")).write_text(done.stdout)
    if not report.exists():
        print(done.stdout[-2000:], file=sys.stderr)
        return Counter(failed=1)
    counts: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        counts[kind] += 1
        if kind == "failed":
            print(f"  {case.get('classname')}::{case.get('name')}", file=sys.stderr)
    counts["left out"] += len(left_out)
    return counts


def _shown(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped", "left out") if counts[kind])


def _hub(scratch: Path) -> Path:
    """Return a hub cache in which every model is the checkpoint."""
    checkpoint = _stand_in(scratch / "stand-in")
    adapter = scratch / "adapter"
    _write_adapter(checkpoint, adapter)
    directories = dict.fromkeys(MODELS, checkpoint) | dict.fromkeys(ADAPTERS, adapter)
    directories |= dict.fromkeys(EMBEDDING_MODELS, fetch_embedding_model.fetch())
    for name, directory in directories.items():
        folder = scratch / "hub" / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0" * 40)
        (folder / "snapshots").mkdir()
        (folder / "snapshots" / ("0" * 40)).symlink_to(directory)
    return scratch


def _stand_in(target: Path) -> Path:
    """Write a checkpoint whose answers end, and return its directory.

    The original weights continue where a larger model would stop, so a test that sets no limit would take minutes. A
    test that sets no temperature gets greedy tokens, so that it passes always or never.
    """
    checkpoint = make().directory
    target.mkdir()
    for file in checkpoint.iterdir():
        (target / file.name).symlink_to(file)
    settings = json.loads((checkpoint / GENERATION).read_text())
    (target / GENERATION).unlink()
    (target / GENERATION).write_text(json.dumps(settings | {"max_new_tokens": MAX_ANSWER_TOKENS, "temperature": 0.0}))
    return target


def _write_adapter(checkpoint: Path, target: Path) -> None:
    """Write an adapter in PEFT's initial state, which changes nothing."""
    import peft  # slow to import, and not needed for --help
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    settings = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, settings).save_pretrained(str(target))


def _packages() -> Path:
    """Return a directory with the pytest plugins that these tests need, and that octavo's own tests must not have."""
    version = hashlib.sha256(repr(PACKAGES).encode()).hexdigest()[:8]
    folder = Env.read().cache_dir / f"vllm-tests-{version}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            pip = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--target", f"{scratch}/packages"]
            for arguments in PACKAGES:
                subprocess.run([*pip, *arguments], check=True)
            Path(scratch, "packages").rename(folder)
    return folder


if __name__ == "__main__":
    raise SystemExit(main())
