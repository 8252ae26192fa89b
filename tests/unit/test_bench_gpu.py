"""scripts/bench_gpu without a GPU: bounds, workloads, time limits, and whole runs with a fake GPU."""

import contextlib
import json
import re
import sys
import tarfile
import tomllib
from pathlib import Path

import bench_gpu
import gpu_bundle
import pytest
from bench_cpu_parts.engines import Command
from bench_cpu_parts.figures import Results
from bench_cpu_parts.session import EngineFailure
from bench_gpu_parts import cuda, roofline, workloads
from bench_gpu_parts.budget import Budget, Share
from bench_gpu_parts.calls import Calls
from bench_gpu_parts.compare import changes
from bench_gpu_parts.fake import H200, FakeGpu
from bench_gpu_parts.machine import MIXED_CHUNKS, AttentionCase, ServedLoad, StepTime
from bench_gpu_parts.roofline import GpuCeilings
from bench_gpu_parts.sections import SECTIONS, TOTAL_S, Run, cost_of
from bench_gpu_parts.shapes import SHAPES, TINY, ShapeName, write_model
from bench_gpu_parts.steps import StepRunner
from source_tree import ROOT

from octavo.frontend.model_files.facts import read_model_facts
from octavo.protocol.config import resolve
from octavo.protocol.config.sources import engine_config
from octavo.protocol.env import Env

CALLS = """
from bench_gpu_parts.callee import serve
def double(number): return 2 * number
def leave(): raise SystemExit(3)
serve({"double": double, "leave": leave})
"""


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def run_all(gpu: FakeGpu, seconds: float = TOTAL_S, clock: Clock | None = None) -> tuple[Run, Budget]:
    run = Run(gpu, Results())
    budget = Budget(seconds, [section.share for section in SECTIONS], clock or Clock())
    bench_gpu._measure(run, list(SECTIONS), budget)
    return run, budget


def test_bounds_are_those_of_the_shapes() -> None:
    # Computed by hand from the sizes of the models: kernels.md, 1.4.
    llama, qwen = cost_of("Llama-3.1-8B"), cost_of("Qwen3-0.6B")
    assert (llama.kv_bytes, qwen.kv_bytes) == (131_072, 114_688)
    milliseconds = [1e3 * roofline.decode_seconds(llama, H200, batch, 1024) for batch in (1, 64, 256)]
    assert milliseconds == pytest.approx([3.52, 5.49, 12.85], rel=0.002)
    milliseconds = [1e3 * roofline.decode_seconds(qwen, H200, batch, 1024) for batch in (1, 64, 256)]
    assert milliseconds == pytest.approx([0.305, 2.03, 7.38], rel=0.005)
    assert roofline.prefill_seconds(llama, H200, 8192) == pytest.approx(0.167, rel=0.005)
    assert roofline.prefill_attention_seconds(H200, 8192, 32, 128) == pytest.approx(0.696e-3, rel=0.005)


def test_workloads_are_the_published_ones() -> None:
    workload = workloads.nano_vllm()
    assert (workload.prompt_tokens, workload.output_tokens) == (142_827, 133_966)
    rate = workload.output_tokens / roofline.workload_seconds(cost_of("Qwen3-0.6B"), H200, workload)
    assert rate == pytest.approx(36.4e3, rel=0.01)
    many = workloads.equal(256, 1024, 1024)
    assert roofline.workload_seconds(cost_of("Qwen3-8B"), H200, many) == pytest.approx(23.5, rel=0.002)


def test_later_sections_keep_their_share() -> None:
    clock = Clock()
    budget = Budget(100, [Share(80, 10), Share(50, 30), Share(50, 20)], clock)
    assert budget.slot(0).left_s() == 50
    clock.now_s = 20
    slot = budget.slot(1)
    assert slot.left_s() == 50
    clock.now_s = 65
    assert slot.allows("this", 5) and not slot.allows("that", 6)
    assert budget.left_out == ["that: needs 6 s, and 5 s were left of its section"]
    assert budget.slot(2).left_s() == 35


def test_the_shares_fit_into_one_call() -> None:
    assert sum(section.share.least_s for section in SECTIONS) <= TOTAL_S <= 480


def test_a_run_measures_everything() -> None:
    run, budget = run_all(FakeGpu())
    text = bench_gpu.summary(run, budget.left_out, Path("nowhere.json"))
    assert not run.results.failures
    assert all("do not fit" in what for what in budget.left_out) and len(budget.left_out) == 4
    lines = text.splitlines()
    assert lines[-1].startswith("| Qwen3-8B") and "no run is recorded" in text
    row = next(line for line in lines if line.startswith("| decode, Llama-3.1-8B, 64 x 1024"))
    assert "7.41, 74%" in row and "74% of the ceiling ≥ 85%" in row and "**no**" in row
    row = next(line for line in lines if line.startswith("| GPU idle"))
    assert "3.0" in row and row.endswith("| yes |")
    assert next(line for line in lines if line.startswith("| what deterministic")).count("8.0") == 1


def test_a_step_of_a_mixture_reads_the_experts_of_its_tokens() -> None:
    one, batch, prefill = (cost_of("Qwen3-30B-A3B", num_tokens) for num_tokens in (1, 64, 8192))
    assert one.layer_flops == prefill.layer_flops, "of a token"
    expert_bytes = 2 * 3 * 2048 * 768 * 48
    assert prefill.weight_bytes - one.weight_bytes == pytest.approx((128 - 8) * expert_bytes, rel=1e-3)
    assert 0.97 < batch.weight_bytes / prefill.weight_bytes < 1.0
    assert prefill.weight_bytes == pytest.approx(61e9, rel=0.02)
    assert cost_of("Qwen3-8B", 64) == cost_of("Qwen3-8B")


class SmallGpu(FakeGpu):
    """Holds no model of 8 B in 16 bits."""

    def total_bytes(self) -> int:
        return 16 * 10**9


def test_a_shape_that_does_not_fit_is_left_out_and_costs_nothing_else() -> None:
    run, budget = run_all(SmallGpu())
    assert not run.results.failures
    assert sum("Llama-3.1-8B" in what for what in budget.left_out) == 8
    assert "decode-Llama-3.1-8B-1-1024" not in run.results.figures
    assert "decode-Qwen3-0.6B-1-1024" in run.results.figures


def test_a_failed_cell_is_reported_and_the_others_still_run() -> None:
    run, budget = run_all(FakeGpu(failing=frozenset({"flex", "octavo-fast"})))
    text = bench_gpu.summary(run, budget.left_out, Path("nowhere.json"))
    row = next(line for line in text.splitlines() if line.startswith("| attention, prefill"))
    assert "failed" in row and "940" in row
    assert "failed: octavo-fast, nano-vllm" in text
    assert "| what deterministic" not in text, "half of it is missing"
    assert "| Qwen3-8B" in text


def test_without_ceilings_nothing_is_claimed() -> None:
    run = Run(FakeGpu(), Results())
    without = [section for section in SECTIONS if section.key != "ceilings"]
    bench_gpu._measure(run, without, Budget(TOTAL_S, [section.share for section in without]))
    columns = [column for row in run.results.figures.values() for column in row.values()]
    assert not any(figure and figure.ceiling_share for column in columns for figure in column)
    assert run.results.failures


class SlowGpu(FakeGpu):
    """Takes its time, on a clock that is moved by hand."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def attention(self, *args, **kwargs) -> float:
        self._clock.now_s += 30
        return super().attention(*args, **kwargs)


def test_a_slow_section_is_cut_short_for_the_later_ones() -> None:
    clock = Clock()
    run, budget = run_all(SlowGpu(clock), clock=clock)
    assert any(what.startswith("attention by") for what in budget.left_out)
    assert run.results.figures["8b"].keys() == {"octavo", "octavo-fast"}
    assert clock.now_s < TOTAL_S / 3


def test_changes_since_a_recorded_run(tmp_path: Path) -> None:
    run, _ = run_all(FakeGpu())
    recorded = {"date": "2026-01-01", "results": json.loads(json.dumps(run.results.as_json()))}
    rows = recorded["results"]["rows"]
    rows["nano-vllm"]["engines"]["octavo"]["median"] /= 1.1
    rows["8b"]["engines"]["octavo"]["median"] /= 1.5
    rows["copy"]["engines"]["octavo"]["median"] *= 1.01
    lines = changes(recorded, run.results)
    assert len(lines) == 3
    assert lines[0].startswith("nano-vllm") and lines[0].endswith("+10.0%: better")
    assert lines[1].startswith("Qwen3-8B") and lines[1].endswith("+50.0%: worse")
    assert lines[2].endswith("of 2026-01-01")


def test_the_report_is_written_after_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "report.json"
    num_rows = []

    class Watching(FakeGpu):
        def attention(self, *args, **kwargs) -> float:
            num_rows.append(len(json.loads(report.read_text())["results"]["rows"]))
            return super().attention(*args, **kwargs)

    monkeypatch.setattr(bench_gpu, "FakeGpu", Watching)
    monkeypatch.setattr(sys, "argv", ["bench_gpu", "--dry-run", "--only", "attention", "--json", str(report)])
    bench_gpu.main()
    # Two ceilings, then a row for three kernels each, and latent attention by ours alone.
    assert num_rows == [2 + (call + 2) // 3 for call in range(3 * 7)] + [9, 10]


def test_a_dry_run_writes_a_report_and_prints_the_table_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    monkeypatch.setattr(
        sys, "argv", ["bench_gpu", "--dry-run", "--quick", "--only", "nano-vllm", "--json", str(report)]
    )
    bench_gpu.main()
    assert capsys.readouterr().out.splitlines()[-1].startswith("| nano-vllm")
    results = json.loads(report.read_text())["results"]
    assert results["rows"].keys() == {"copy", "matrix", "nano-vllm"}
    assert results["ceilings"]["copy_bytes"] == H200.copy_bytes


def test_calls_into_a_process(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(CALLS)
    command = Command((sys.executable, "-P", str(script)), (("PYTHONPATH", ":".join(filter(None, sys.path))),))
    with Calls(command, tmp_path / "log", 20) as calls:
        assert calls.call("double", 20, number=21) == 42
        with pytest.raises(EngineFailure, match="missing 1 required"):
            calls.call("double", 20)
        assert calls.call("double", 20, number=1) == 2, "a failure does not end it"
        with pytest.raises(EngineFailure, match="it has ended"):
            calls.call("leave", 20)


DRIVER = """
import os
from bench_gpu_parts.callee import serve
def facts(): return {"name": f"process {os.getpid()}", "total_bytes": 100}
def ceilings(): return {"copy_bytes": 4e12, "matrix_flops": 8e14}
def attention(kernel, **case):
    if kernel == "flex": os.abort()
    return 0.001 * case["batch"]
def open_steps(model, max_tokens, max_batch, settings):
    assert settings == {"kv_cache_dtype": "auto"}
    assert os.path.exists(os.path.join(model, "config.json")) and max_tokens == 300
def step(batch, context, num_tokens, asks_busy, sampling): return 0.01 * batch, 0.009 * batch if asks_busy else None
def mixed_step(batch, context, chunk): return 0.001 * (batch + chunk), 0.002
def serve_load(model, settings, load, traces):
    assert settings["max_model_len"] == load["input_len"] + load["output_len"] + 8
    return {"output_tokens_per_s": load["rate"], "ttft_p99_s": 1, "itl_median_s": 2, "itl_p99_s": 3, "idle_share": 0.1}
serve({name: function for name, function in globals().items() if callable(function) and name != "serve"})
"""


def test_a_crash_in_the_driver_is_an_engine_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    monkeypatch.setattr(cuda, "_driver", lambda name: Command((sys.executable, "-P", str(script)), cuda._environment()))
    gpu = cuda.CudaGpu(tmp_path / "logs")
    (tmp_path / "logs").mkdir()
    with contextlib.closing(gpu):
        name = gpu.name()
        assert gpu.total_bytes() == 100 and gpu.ceilings(20) == GpuCeilings(4e12, 8e14)
        with pytest.raises(EngineFailure, match="it has ended"):
            gpu.attention("flex", AttentionCase(3, 1024, 1), 20)
        assert gpu.attention("sdpa", AttentionCase(3, 1024, 1), 20) == 0.003
        assert gpu.name() == name, "asked once"
        with gpu.steps(None, max_tokens=300, max_batch=2, limit_s=20) as steps:
            assert steps.step(2, 100, 1) == StepTime(0.02)
            assert steps.step(2, 100, 1, asks_busy=True) == StepTime(0.02, 0.018)
            assert steps.mixed_step(4, 100, 16) == StepTime(0.02, 0.002)
        load = workloads.Load(2, 10, 5, 7.0, 100, {})
        assert gpu.serve("Qwen3-0.6B", load, 20) == ServedLoad(7.0, 1, 2, 3, 0.1)


def test_steps_of_the_workers_own_executor(tmp_path: Path) -> None:
    model = write_model(TINY, tmp_path / "tiny")
    settings = {"max_model_len": 256, "dtype": "float32"}
    runner = StepRunner(str(model), "cpu", max_tokens=3 * 32 + MIXED_CHUNKS, max_batch=3, settings=settings)
    prefill_s, busy_s = runner.step(1, 32, 32)
    assert prefill_s > 0 and busy_s is None
    decode_s, _ = runner.step(3, 32, 1)
    assert 0 < decode_s < 1
    assert runner.step(3, 16, 1)[0] > 0, "the batch is empty again"
    assert runner.mixed_step(2, 16, 1)[0] > 0
    assert runner.step(3, 16, 1, sampling={"top_k": 5, "top_p": 0.9})[0] > 0


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_models_that_can_be_served(name: ShapeName, tmp_path: Path) -> None:
    model = write_model(SHAPES[name], tmp_path / name)
    said = engine_config({"model": str(model), "load_format": "dummy", "skip_tokenizer_init": True})
    config = resolve(said, read_model_facts(said.model, Env.read()), device="cuda", num_cores=1)
    assert config.dtype == "bfloat16"
    kv_bytes = 2 * config.model.num_layers * config.model.num_kv_heads * config.model.head_dim * 2
    assert kv_bytes == cost_of(name).kv_bytes


def test_the_bundle_has_what_the_machine_lacks() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[^\w-]", requirement)[0] for requirement in project["dependencies"]}
    assert needed == {*gpu_bundle.MISSING, *gpu_bundle.PRESENT}, "gpu_bundle says of each whether it is carried"
    wheels = {"one.whl": 3 << 20, "another.whl": 1 << 19}
    text = gpu_bundle.summary(wheels, 4 << 20)
    assert "7.50 MiB  together, of 64 MiB" in text
    assert text.splitlines()[-1] == gpu_bundle.BENCH_COMMAND
    commands = (gpu_bundle.FIRST_LOOK_COMMAND, gpu_bundle.TEST_COMMAND, gpu_bundle.BENCH_COMMAND)
    assert all(command in gpu_bundle.start_here() and len(command) < 2000 for command in commands)
    for script in re.findall(r"scripts/\w+\.py", "".join(commands)):
        assert ROOT / script in gpu_bundle.source_files()


def test_the_archive_has_the_page_and_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bundle, "ROOT", tmp_path)
    for name in ("build/gpu_wheels/one.whl", "scripts/bench_gpu.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    files = [path for path in tmp_path.rglob("*.*") if path.is_file()]
    gpu_bundle.pack(tmp_path / "bundle.tar.gz", files)
    with tarfile.open(tmp_path / "bundle.tar.gz") as tar:
        assert set(tar.getnames()) == {gpu_bundle.PAGE, "build/gpu_wheels/one.whl", "scripts/bench_gpu.py"}
        page = tar.extractfile(gpu_bundle.PAGE)
        assert page is not None and "The first look" in page.read().decode()
