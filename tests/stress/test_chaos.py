"""`octavo bench chaos`: real processes are killed, and every answer equals the undisturbed one."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tiny_encoders import make_encoder
from tiny_families import FAMILIES
from tiny_models import make_tiny

TIMEOUT_S = 3000


def chaos(model: Path, report: Path, words: str) -> tuple[int, str, dict[str, Any]]:
    """Run it; return its exit code, what it printed, and its report."""
    command = [sys.executable, "-P", "-m", "octavo", "bench", "chaos", str(model), *words.split()]
    command += ["--output-json", str(report), "--log-dir", str(report.with_suffix(".logs")), "--disable-tqdm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert report.exists(), f"{done.stdout}\n{done.stderr}"
    return done.returncode, f"{done.stdout}\n{done.stderr}", json.loads(report.read_text())


def struck(report: dict[str, Any]) -> Counter[str]:
    """How many processes of each kind had to be replaced."""
    return Counter(deed["target"] for deed in report["strikes"] if deed["action"] != "stopped, went on")


def test_the_short_form(tmp_path: Path) -> None:
    model = make_tiny("LlamaForCausalLM", tmp_path / "model")
    words = "--dtype float32 --requests 48 --distinct 16 --kills 4 --clients 24 --client-processes 1"
    code, printed, report = chaos(model, tmp_path / "report.json", f"{words} --server-processes 2 --seed 3")
    assert code == 0, printed
    counts = report["counts"]
    ways_to_end = ("equal, bit for bit", "left midway, equal so far", "aborted midway, equal so far")
    assert sum(counts.get(way, 0) for way in ways_to_end) == 48
    assert counts["equal, bit for bit"] > 30
    assert sum(struck(report).values()) == 4
    assert set(struck(report)) == {"worker", "core", "http process", "application"}
    assert not report["findings"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["bert", "bert-classes"])
def test_models_that_pool(name: str, tmp_path: Path) -> None:
    model = make_encoder(name, tmp_path / "model")
    words = "--dtype float32 --requests 200 --kills 8 --clients 40 --client-processes 2 --server-processes 2 --seed 3"
    code, printed, report = chaos(model, tmp_path / "report.json", words)
    assert code == 0, printed
    assert report["counts"]["equal, bit for bit"] == 200
    assert sum(struck(report).values()) >= 7
    assert not report["findings"]


@pytest.mark.long
def test_the_long_form(smollm2_gguf: Path, tmp_path: Path) -> None:
    code, printed, report = chaos(smollm2_gguf, tmp_path / "report.json", "--requests 1000 --kills 30 --seed 7")
    assert code == 0, printed
    assert min(struck(report).values()) >= 7
    assert sum(struck(report).values()) >= 30


@pytest.mark.long
@pytest.mark.parametrize("flags", ["--tensor-parallel-size 2", "--data-parallel-size 2"])
def test_several_processes_that_share_the_work(flags: str, tmp_path: Path) -> None:
    model = make_tiny("LlamaForCausalLM", tmp_path / "model")
    words = f"--dtype float32 --requests 200 --kills 14 --clients 60 --client-processes 2 --seed 5 {flags}"
    code, printed, report = chaos(model, tmp_path / "report.json", words)
    assert code == 0, printed
    assert "all workers" in struck(report)
    assert ("all cores" in struck(report)) == ("data" in flags)
    assert not report["findings"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("llama", "--kv-offloading-size 0.005"),
        ("granite-hybrid-dense", "--kv-offloading-size 0.01 --max-num-seqs 8"),
        ("granite-hybrid-dense", "--tensor-parallel-size 2 --max-num-seqs 8"),
        ("mamba2", "--pipeline-parallel-size 2 --max-num-seqs 8"),
    ],
)
def test_blocks_and_states_in_host_memory_and_files(name: str, flags: str, tmp_path: Path) -> None:
    """Every content that can be copied is, over kills of whoever writes and reads it."""
    arch, class_name, settings = FAMILIES.get(name, ("LlamaForCausalLM", None, {}))
    model = make_tiny(arch, tmp_path / "model", class_name=class_name, **settings)
    words = "--dtype float32 --requests 150 --kills 10 --clients 40 --client-processes 2 --server-processes 2 --seed 9 "
    words += f"--no-kv-offloading-recompute --kv-offloading-path {tmp_path / 'blocks'} {flags}"
    code, printed, report = chaos(model, tmp_path / "report.json", words)
    assert code == 0, printed
    assert {"worker", "core"} <= set(struck(report))
    assert not report["findings"]
    assert [path for path in (tmp_path / "blocks").rglob("*") if path.is_file()], "no content was written"
