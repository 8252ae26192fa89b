"""scripts/bench_cpu: bounds, ratios, the table, and sessions that are stopped, that fail and that are ended."""

import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bench_cpu_parts import ceilings, processes, rows, workloads
from bench_cpu_parts.ceilings import CeilingMeter, Ceilings
from bench_cpu_parts.engines import Command, LlamaCpp, Octavo
from bench_cpu_parts.figures import Figure, Metric, Results, Target
from bench_cpu_parts.offline import Limits, OfflineBench
from bench_cpu_parts.roofline import least_seconds, model_cost
from bench_cpu_parts.serving import ServingBench
from bench_cpu_parts.session import EngineFailure, Session
from bench_cpu_parts.table import noise, table
from bench_cpu_parts.workloads import Workload
from source_tree import ROOT
from waiting import read_line, wait_until

SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49_152,
}
CEILINGS = Ceilings(read_bytes=36e9, bf16_flops=400e9, int8_ops=800e9, num_threads=2)
RATE = Metric("rate", "a rate", "tok/s", targets=(Target("best", 1.5, 2.0), Target("vllm", 1.1)))
DELAY = Metric("delay", "a delay", "ms", is_higher_better=False, targets=(Target("vllm", 0.6),), digits=1)

# A driver whose engine does what the prompt's first token says.
DRIVER = """
import os, subprocess, sys, time
sys.path.insert(0, {parts!r})
from drive_loop import run

def load(options):
    print("noise on standard output")
    child = subprocess.Popen(["sleep", "1000"])
    def generate(prompts, max_tokens):
        kind = prompts[0][0]
        if kind == 1: return max_tokens
        if kind == 2: time.sleep(1000)
        if kind == 3: return [0 for _ in max_tokens]
        raise SystemExit("as it was told")
    return generate, child.pid
run(load)
"""


def driver(folder: Path) -> Command:
    script = folder / "driver.py"
    script.write_text(DRIVER.format(parts=str(ROOT / "scripts" / "bench_cpu_parts")))
    return Command((sys.executable, str(script), "{}"))


def is_running(pid: int) -> bool:
    fields = processes._stat(pid)
    return fields is not None and fields[0] != "Z"


def state(pid: int) -> str:
    fields = processes._stat(pid)
    assert fields
    return fields[0]


def test_decode_is_bound_by_reading_the_weights() -> None:
    cost = model_cost(SMOLLM2, 16)
    assert cost.weight_bytes == pytest.approx(269e6, rel=0.002)  # all 134.5 million of them
    assert cost.layer_flops == pytest.approx(2 * 106.2e6, rel=0.002)
    seconds = least_seconds(cost, CEILINGS, [Workload([[1] * 32], [256])])
    assert seconds is not None
    assert 256 / seconds == pytest.approx(36e9 / 269e6, rel=0.02)
    assert least_seconds(model_cost(SMOLLM2, 4), CEILINGS, [Workload([[1] * 32], [256])]) < seconds / 3


def test_prefill_is_bound_by_the_dot_rate() -> None:
    workload = Workload([[1] * 2048], [1])
    seconds = least_seconds(model_cost(SMOLLM2, 16), CEILINGS, [workload])
    # Each token is multiplied with 106.2 million weights and looks at half of the prompt; one is sampled.
    attention = 4 * 30 * 576 * 2048 * 2049 / 2
    assert seconds == pytest.approx((2048 * 2 * 106.2e6 + attention + 2 * 28.3e6) / 400e9, rel=0.001)
    assert least_seconds(model_cost(SMOLLM2, 16), CEILINGS, [workload] * 3) == pytest.approx(3 * seconds)
    assert least_seconds(model_cost(SMOLLM2, 8), CEILINGS, [workload]) == pytest.approx(seconds / 2)


def test_a_shared_prefix_is_computed_once() -> None:
    cost = model_cost(SMOLLM2, 16)
    prompts, lengths = [[1] * 528] * 64, [32] * 64
    shared = least_seconds(cost, CEILINGS, [Workload(prompts, lengths, 512)])
    assert shared < 0.4 * least_seconds(cost, CEILINGS, [Workload(prompts, lengths)])


def test_the_ceiling_is_the_better_of_two_measurements() -> None:
    noisy = Ceilings(read_bytes=20e9, bf16_flops=410e9, int8_ops=700e9, num_threads=2)
    assert noisy.or_better(CEILINGS) == Ceilings(36e9, 410e9, 800e9, 2)


def test_there_is_no_bound_without_a_dot_rate() -> None:
    unknown = Ceilings(read_bytes=36e9, bf16_flops=0.0, int8_ops=0.0, num_threads=2)
    assert least_seconds(model_cost(SMOLLM2, 16), unknown, [Workload([[1]], [1])]) is None


@pytest.mark.parametrize("row", rows.OFFLINE, ids=lambda row: row.key)
def test_workloads_have_the_same_lengths_and_new_tokens_in_every_run(row: rows.OfflineRow) -> None:
    one, two = row.make(random.Random(1)), row.make(random.Random(2))
    assert [[len(p) for p in w.prompts] for w in one] == [[len(p) for p in w.prompts] for w in two]
    assert [w.max_tokens for w in one] == [w.max_tokens for w in two]
    assert not {tuple(p[:8]) for w in one for p in w.prompts} & {tuple(p[:8]) for w in two for p in w.prompts}
    # Every request fits what the engines are given.
    for workload in one:
        longest = max(len(p) + n for p, n in zip(workload.prompts, workload.max_tokens, strict=True))
        assert longest <= LlamaCpp.tokens_per_stream or row.streams == "one"
        assert len(workload.prompts) <= LlamaCpp.max_streams


def test_the_mixed_batch_is_the_issues() -> None:
    (batch,) = workloads.mixed_batch(random.Random(0))
    assert len(batch.prompts) == 64
    assert 16 <= min(map(len, batch.prompts)) <= 40 and 220 <= max(map(len, batch.prompts)) <= 256
    assert 16 <= min(batch.max_tokens) <= 30 and 110 <= max(batch.max_tokens) <= 128
    (shared,) = workloads.shared_prefix(random.Random(0))
    assert len({tuple(prompt[:512]) for prompt in shared.prompts}) == 1
    assert len({tuple(prompt) for prompt in shared.prompts}) == 64


def results() -> Results:
    found = Results()
    for octavo, vllm, llama in ((100.0, 50.0, 80.0), (60.0, 30.0, 50.0), (110.0, 40.0, 70.0)):
        found.add(RATE, "octavo", Figure(octavo, 0.8, 0.1))
        found.add(RATE, "vllm", Figure(vllm))
        found.add(RATE, "llama", Figure(llama))
    found.add(DELAY, "octavo", Figure(30.0, other_load=0.5))
    found.add(DELAY, "vllm", None)
    found.add(DELAY, "octavo", Figure(40.0))
    found.add(DELAY, "vllm", Figure(50.0))
    return found


def test_engines_are_compared_within_a_round() -> None:
    found = results()
    assert found.median(RATE, "octavo") == 100.0
    assert found.ratio(RATE, "octavo", "vllm") == 2.0
    assert found.ratio(RATE, "octavo", "openvino") is None
    assert found.best_peer(RATE) == "llama"
    assert found.ratio(DELAY, "octavo", "vllm") == 0.8  # of the round in which both were there
    assert found.reached(RATE, RATE.targets[0]) == (1.25, False)
    assert found.reached(RATE, RATE.targets[1]) == (2.0, True)
    assert found.reached(DELAY, DELAY.targets[0]) == (0.8, False)
    assert found.reached(rows.MEMORY, rows.MEMORY.targets[0]) is None
    found.add(rows.MEMORY, "octavo", Figure(1.2))
    assert found.reached(rows.MEMORY, rows.MEMORY.targets[0]) == (1.2, True)


def test_the_table_has_medians_spreads_shares_and_verdicts() -> None:
    text = table(results(), {"octavo": "octavo", "llama": "llama.cpp", "vllm": "vLLM", "openvino": "OpenVINO"})
    head, _, rate, delay = text.splitlines()
    assert "OpenVINO" not in head
    assert "| 100 (60..110), 80% | 70 (50..80) | 40 (30..50) |" in rate
    assert "1.25x the best ≥ 1.5x, aim 2x; 2.00x vLLM ≥ 1.1x | **no** |" in rate
    assert "| 35.0 (30.0..40.0) |  | 50.0 |" in delay
    assert "0.80x vLLM ≤ 0.6x | **no** |" in delay


def test_the_report_has_every_round_and_what_failed() -> None:
    found = results()
    found.failures.append("it broke")
    report = found.as_json()
    assert report["failures"] == ["it broke"]
    vllm = report["rows"]["delay"]["engines"]["vllm"]
    assert (vllm["median"], vllm["rounds"][0], vllm["rounds"][1]["value"]) == (50.0, None, 50.0)
    assert report["rows"]["rate"]["targets"][1]["reached"] == (2.0, True)
    assert "0.10 cores in the median measurement, 0.50 at most" in noise(found)


def test_ceilings_are_those_of_a_computer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "BUFFER_BYTES", 32 << 20)  # enough to be a rate, though perhaps that of a cache
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        pytest.skip("no C++ compiler")
    with CeilingMeter(1) as meter:
        probe = meter.probe()
    assert 1e8 < probe.read_bytes < 1e13
    for rate in (probe.bf16_flops, probe.int8_ops):
        assert rate == 0 or 1e9 < rate < 1e15


def test_a_session_generates_rests_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with Session(driver(tmp_path), tmp_path / "log", 30) as session:
        family = processes.tree(session.pid)
        assert family == [session.pid, session.engine_pid]
        assert session.generate(Workload([[1, 5]], [7]), 30) < 1.0
        assert "noise on standard output" in (tmp_path / "log").read_text()
        session.rest()
        wait_until(lambda: {state(pid) for pid in family} == {"T"})
        with pytest.raises(EngineFailure, match="no answer within 0 s"):
            session.generate(Workload([[1]], [1]), 0.3)
        session.wake()
        wait_until(lambda: "T" not in {state(pid) for pid in family})
        assert processes.pss_bytes(family) > 1e6
        session.rest()  # it is ended in its sleep
    assert not any(map(is_running, family))


@pytest.mark.parametrize(
    ("kind", "message"), [(2, "no answer within 0 s"), (3, "generated 0 tokens, not 9"), (4, "as it was told")]
)
def test_a_failure_says_what_happened(tmp_path: Path, kind: int, message: str) -> None:
    with Session(driver(tmp_path), tmp_path / "log", 30) as session, pytest.raises(EngineFailure, match=message):
        session.generate(Workload([[kind]], [9]), 0.4 if kind == 2 else 30)


def test_a_program_that_does_not_start_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(EngineFailure, match="it has ended"):
        Session(Command((sys.executable, "-c", "raise SystemExit('no such model')")), tmp_path / "log", 30)
    assert "no such model" in (tmp_path / "log").read_text()


def test_a_session_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; sys.path[:0] = sys.argv[1:3]\n"
        "from pathlib import Path; from bench_cpu_parts.engines import Command\n"
        "from bench_cpu_parts.session import Session\n"
        "session = Session(Command((sys.executable, sys.argv[3], '{}')), Path(sys.argv[4]), 30)\n"
        "print(session.pid, flush=True); session.rest(); time.sleep(1000)"
    )
    words = [str(ROOT / "scripts"), str(ROOT / "tests" / "support"), driver(tmp_path).words[1], str(tmp_path / "log")]
    with subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(read_line(parent.stdout))
        sleeper = processes.tree(pid)[1]
        parent.kill()
    wait_until(lambda: not is_running(pid))
    os.kill(sleeper, signal.SIGKILL)  # the fake engine knows nothing of parents


class FakeEngine:
    """An engine whose session is the fake driver."""

    key = "fake"
    title = "Fake"
    is_split_by_streams = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def runs(self, model: str) -> bool:
        return True

    def session(self, model: str, streams: str, port: int) -> Command:
        return driver(self.folder)


class FakeMeter:
    def probe(self) -> Ceilings:
        return CEILINGS


def test_rows_are_measured_in_rounds_and_a_failure_ends_an_engines_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench_cpu_parts.models.config", lambda name: SMOLLM2)
    monkeypatch.setattr("bench_cpu_parts.models.bits_per_weight", lambda name: 16.0)
    good = rows.OfflineRow(RATE, lambda rng: [Workload([[1]], [7]), Workload([[1]], [3])])
    bad = rows.OfflineRow(DELAY, lambda rng: [Workload([[4]], [7])])
    found = Results()
    arguments = (FakeMeter(), Limits(3, 30, 30), found, tmp_path)
    with OfflineBench("smollm2", [FakeEngine(tmp_path)], *arguments) as bench:
        bench.run(good)
        bench.run(bad)
        bench.run(good)
    figures = found.figures["rate"]["fake"]
    assert len(figures) == 6 and all(figures)
    assert figures[0].ceiling_share is not None and figures[0].other_load is not None
    assert found.figures["delay"]["fake"] == [None]
    assert len(found.failures) == 1 and "Fake, a delay: it has ended" in found.failures[0]


# Healthy at its second answer; every completion is one token.
SERVER = """
import http.server, sys
answers = []
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        answers.append(self.path)
        self.send_response(200 if len(answers) > 1 else 503); self.end_headers()
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(int(sys.argv[2])); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class FakeServed(FakeEngine):
    """An engine whose server answers every completion with one status."""

    def __init__(self, key: str, folder: Path, status: int) -> None:
        super().__init__(folder)
        self.key = self.title = key
        self.status = status

    def server(self, model: Path, port: int) -> Command:
        return Command((sys.executable, "-c", SERVER, str(port), str(self.status)))


def test_servers_are_launched_and_asked_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench_cpu_parts.models.directory", lambda name: tmp_path)
    monkeypatch.setattr("bench_cpu_parts.models.config", lambda name: SMOLLM2)
    monkeypatch.setattr("bench_cpu_parts.models.bits_per_weight", lambda name: 16.0)
    asked: list[list[str]] = []

    def run_script(name: str, flags: list[str], limit_s: float) -> dict[str, object]:
        asked.append(flags)
        times = {"median": 5.0, "p99": 9.0}
        return {"results": {"requests_per_s": 2.0, "ttft_ms": times, "itl_ms": times, "tpot_ms": times}}

    monkeypatch.setattr("bench_cpu_parts.serving.run_script", run_script)
    engines = [FakeServed("good", tmp_path, 200), FakeServed("bad", tmp_path, 500)]
    found = Results()
    with ServingBench(engines, FakeMeter(), Limits(2, 30, 30), found, tmp_path) as bench:
        bench.launch()
        bench.http(rows.HTTP[0])
        pids = [server.pid for server in bench._servers.values()]
    assert not any(map(is_running, pids))
    launches = found.figures["launch"]
    assert len(launches["good"]) == 2 and all(0 < figure.value < 30 for figure in launches["good"])
    assert launches["bad"] == [None, None]
    assert any("status 500" in failure for failure in found.failures)
    assert len({flags[1] for flags in asked}) == 1  # the one server that is left
    assert [flags[3] for flags in asked] == ["0", "1", "2"]
    rates = found.figures["http-burst.rate"]["good"]
    assert [figure.value for figure in rates] == [2.0, 2.0]
    assert rates[0].ceiling_share == pytest.approx(2.0 * LEAST_S_OF_A_REQUEST, rel=0.05)
    assert found.figures["http-burst.itl99"]["good"][0].value == 9.0


# 191 tokens through the layers, 64 through the head, at 400 GFLOP/s; attention adds a little.
LEAST_S_OF_A_REQUEST = (191 * 2 * 106.2e6 + 64 * 2 * 28.3e6) / 400e9


def test_quantized_columns_are_there_when_the_engine_can_quantize() -> None:
    assert [Octavo(kind).key for kind in Octavo.quantizations()] in (
        [],
        ["octavo-w8a8", "octavo-int8", "octavo-int4"],
    )
    assert Octavo("w8a8", has_int8_cache=True).key == "octavo-w8a8-kv8"
    assert Octavo("int8").runs("smollm2") and not Octavo("int8").runs("qwen2.5-0.5b")


def test_settings_of_engines_are_measured_beside_the_defaults() -> None:
    engine = Octavo("int8", engine_args=(("num_scheduler_steps", 1), ("enable_prefix_caching", False)))
    assert engine.key == "octavo-int8+args" and engine.bits_per_weight == 8.5
    assert engine.title == "octavo int8 num_scheduler_steps=1 enable_prefix_caching=False"
    command = engine.server(Path("model"), 8000)
    assert command is not None
    assert command.words[-3:] == ("--num-scheduler-steps", "1", "--no-enable-prefix-caching")
