"""The rows of the table as data: workloads, metrics and octavo's targets (issues 3 and 15)."""

from collections.abc import Callable
from dataclasses import dataclass

from bench_cpu_parts import workloads
from bench_cpu_parts.engines import Streams
from bench_cpu_parts.figures import Metric, Target
from bench_cpu_parts.models import ModelName
from bench_cpu_parts.workloads import MakeWorkloads, Workload


@dataclass(frozen=True)
class OfflineRow:
    """A workload for each engine's own API."""

    metric: Metric
    make: MakeWorkloads
    model: ModelName = "smollm2"
    streams: Streams = "many"
    tokens: Callable[[Workload], int] = lambda workload: workload.output_tokens
    """Returns the number of tokens that count for the rate."""

    @property
    def key(self) -> str:
        return self.metric.key


def _prompt_tokens(workload: Workload) -> int:
    return workload.prompt_tokens


_OUT, _IN = "output tok/s", "prompt tok/s"

OFFLINE = (
    OfflineRow(
        Metric(
            "decode",
            "one stream, 32 in, 256 out",
            _OUT,
            targets=(Target("llama", 1.1), Target("vllm", 1.9)),
        ),
        workloads.one_stream,
        streams="one",
    ),
    OfflineRow(
        Metric("batch", "64 at once, 16..256 in, 16..128 out", _OUT, targets=(Target("best", 1.7, 2.2),)),
        workloads.mixed_batch,
    ),
    OfflineRow(
        Metric("prefill", "prefill, 2,048 tokens", _IN, targets=(Target("openvino", 1.15, 1.5),)),
        workloads.long_prompts,
        streams="one",
        tokens=_prompt_tokens,
    ),
    OfflineRow(
        Metric("shared", "64 sharing 512 tokens, 32 out", _OUT, targets=(Target("vllm", 1.5, 2.0),)),
        workloads.shared_prefix,
    ),
    OfflineRow(
        Metric("q4_1", "4-bit GGUF (Q4_1), one stream", _OUT, targets=(Target("llama", 1.8, 3.0),)),
        workloads.one_stream,
        model="smollm2-q4_1",
        streams="one",
    ),
    OfflineRow(
        Metric("decode-0.5b", "0.5 B, one stream, 32 in, 256 out", _OUT, digits=1),
        workloads.one_stream,
        model="qwen2.5-0.5b",
        streams="one",
    ),
    OfflineRow(
        Metric("batch-0.5b", "0.5 B, 64 at once", _OUT),
        workloads.mixed_batch,
        model="qwen2.5-0.5b",
    ),
    OfflineRow(
        Metric("prefill-0.5b", "0.5 B, prefill, 2,048 tokens", _IN),
        workloads.long_prompts,
        model="qwen2.5-0.5b",
        streams="one",
        tokens=_prompt_tokens,
    ),
    OfflineRow(
        Metric("decode-moe", "8 of 64 experts, one stream", _OUT, targets=(Target("best", 1.1),), digits=1),
        workloads.one_stream,
        model="qwen3-moe",
        streams="one",
    ),
    OfflineRow(
        Metric("batch-moe", "8 of 64 experts, 32 at once", _OUT, targets=(Target("best", 1.2),)),
        workloads.mixed_batch_32,
        model="qwen3-moe",
    ),
    OfflineRow(
        Metric("decode-gemma", "Gemma 3 1B, one stream", _OUT, targets=(Target("best", 1.1),), digits=1),
        workloads.one_stream,
        model="gemma3-1b",
        streams="one",
    ),
    OfflineRow(
        Metric("batch-gemma", "Gemma 3 1B, 32 at once", _OUT, targets=(Target("best", 1.2),)),
        workloads.mixed_batch_32,
        model="gemma3-1b",
    ),
)

MEMORY = Metric(
    "memory",
    "resident memory after 64 at once",
    "GB",
    is_higher_better=False,
    targets=(Target("absolute", 1.5, 1.0),),
    digits=2,
)
IDLE = Metric(
    "idle",
    "idle processor time, 5 s",
    "% of a core",
    is_higher_better=False,
    # The system counts hundredths of a second: one of them in five seconds is noise.
    targets=(Target("absolute", 0.2),),
    digits=1,
)
LAUNCH = Metric(
    "launch",
    "launch to first token, again",
    "s",
    is_higher_better=False,
    targets=(Target("absolute", 4.0, 2.0),),
    digits=2,
)

RESIDENT_KEY = "resident"
LAUNCH_KEY = LAUNCH.key
OVERHEAD_KEY = "overhead"


@dataclass(frozen=True)
class HttpRow:
    """Requests sent to each engine's server by scripts/bench_serve."""

    key: str
    flags: tuple[str, ...]
    metrics: tuple[tuple[Metric, str, str | None], ...]
    """Each metric with its key in bench_serve's report: the name, and the statistic if there are several."""
    workload: Workload | None
    """The same requests in token counts, for the ceiling of requests per second; `None` if the arrival rate sets it."""


_NUM_REQUESTS, _INPUT_LEN, _OUTPUT_LEN = 100, 128, 64
_LENGTHS = ("--input-len", str(_INPUT_LEN), "--output-len", str(_OUTPUT_LEN))


def _latency(key: str, title: str, *targets: Target) -> Metric:
    return Metric(key, title, "ms", is_higher_better=False, targets=targets)


HTTP = (
    HttpRow(
        "http-burst",
        ("--num-prompts", str(_NUM_REQUESTS), "--max-concurrency", str(_NUM_REQUESTS), *_LENGTHS),
        (
            (
                Metric(
                    "http-burst.rate",
                    "HTTP, 100 at once, 128 in, 64 out",
                    "requests/s",
                    targets=(Target("vllm", 1.7, 2.0),),
                    digits=2,
                ),
                "requests_per_s",
                None,
            ),
            (_latency("http-burst.ttft50", "  TTFT p50", Target("vllm", 1.0)), "ttft_ms", "median"),
            (_latency("http-burst.ttft99", "  TTFT p99", Target("vllm", 1.0)), "ttft_ms", "p99"),
            (_latency("http-burst.itl99", "  ITL p99", Target("vllm", 1.0)), "itl_ms", "p99"),
        ),
        Workload([[0] * _INPUT_LEN] * _NUM_REQUESTS, [_OUTPUT_LEN] * _NUM_REQUESTS),
    ),
    HttpRow(
        "http-steady",
        ("--num-prompts", str(_NUM_REQUESTS), "--max-concurrency", "1000", "--request-rate", "4", *_LENGTHS),
        (
            (_latency("http-steady.ttft50", "HTTP, 4 requests/s: TTFT p50", Target("vllm", 0.6)), "ttft_ms", "median"),
            (_latency("http-steady.ttft99", "  TTFT p99", Target("vllm", 0.6)), "ttft_ms", "p99"),
            (_latency("http-steady.tpot", "  TPOT p50", Target("vllm", 0.6)), "tpot_ms", "median"),
        ),
        None,
    ),
)

OVERHEAD = {
    "completions": Metric(
        "overhead.whole",
        "2 layers, 64 wide, 200 streams: not streamed",
        "requests/s",
        targets=(Target("vllm", 1.5, 3.0),),
    ),
    "completions, streamed": Metric(
        "overhead.streamed", "  streamed", "requests/s", targets=(Target("vllm", 1.5, 3.0),)
    ),
}
"""Modes of scripts/bench_overhead, and the metrics made of them."""

ALL_KEYS = (
    *(row.key for row in OFFLINE),
    RESIDENT_KEY,
    LAUNCH_KEY,
    *(row.key for row in HTTP),
    OVERHEAD_KEY,
)
