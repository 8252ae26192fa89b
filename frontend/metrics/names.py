"""The table of all metrics: name, kind, help, labels, buckets.

The names are vLLM's, so that existing dashboards need at most another prefix.
"""

from dataclasses import dataclass
from enum import Enum

from octavo.protocol.config import ResolvedConfig


class Kind(Enum):
    """Prometheus type of a metric."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


REQUEST_LATENCY_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_INTERVAL_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SMALL_COUNTS = (1, 2, 5, 10, 20)
PREEMPTION_COUNTS = (0, 1, 2, 5, 10)
UP_TO_MODEL_LEN = ()
"""Placeholder for 1, 2, 5, 10, ... up to `max_model_len`, which is known only at run time."""


@dataclass(frozen=True)
class MetricName:
    """One metric. Every metric also has the labels `model_name` and `engine`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] | None = None
    """Upper edges of a histogram."""


_G, _C, _H = Kind.GAUGE, Kind.COUNTER, Kind.HISTOGRAM

METRICS: tuple[MetricName, ...] = (
    MetricName("num_requests_running", _G, "Requests in the running batch."),
    MetricName("num_requests_waiting", _G, "Requests waiting to be scheduled."),
    MetricName(
        "num_requests_waiting_by_reason", _G,
        "Waiting requests by reason: capacity, or deferred (their grammar is being compiled, or they are held back "
        "until the request that crashes the engine is found). The sum is `num_requests_waiting`.",
        ("reason",),
    ),
    MetricName("kv_cache_usage_perc", _G, "Fraction of KV cache blocks in use, 0 to 1."),
    MetricName(
        "cache_config_info", _G, "Always 1; its labels are the cache's configuration.",
        ("block_size", "num_gpu_blocks", "enable_prefix_caching", "gpu_memory_utilization"),
    ),
    MetricName(
        "lora_requests_info", _G,
        "Time of the engine's latest report; its labels are the LoRA adapters of running and waiting requests. Only of "
        "engines with adapters.", ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    ),
    MetricName("mm_cache_queries", _C, "Images of requests looked up in the cache of processed images."),
    MetricName("mm_cache_hits", _C, "Lookups that found the image (--mm-processor-cache-gb)."),
    MetricName(
        "encoder_cache_queries", _C, "Lookups of media items by steps, one for each chunk of the prompt.",
    ),
    MetricName("encoder_cache_hits", _C, "Lookups whose rows the workers had; the other items were encoded."),
    MetricName("encoder_tokens", _C, "Tokens of all images, videos and audio clips that were encoded."),
    MetricName("encoder_cache_usage_perc", _G, "Fraction of --encoder-cache-tokens in use, 0 to 1."),
    MetricName("prefix_cache_queries", _C, "Prompt tokens looked up in the prefix cache."),
    MetricName("prefix_cache_hits", _C, "Prompt tokens found in the prefix cache."),
    MetricName(
        "external_prefix_cache_queries", _C, "Prompt tokens not in the prefix cache, looked up in host memory "
        "(--kv-offloading-size).",
    ),
    MetricName("external_prefix_cache_hits", _C, "Prompt tokens found in host memory."),
    MetricName("kv_offload_store_bytes", _C, "KV cache copied to host memory."),
    MetricName("kv_offload_load_bytes", _C, "KV cache copied back from host memory."),
    MetricName("kv_offload_usage_perc", _G, "Fraction of the host memory for blocks and states with contents, 0 to 1."),
    MetricName(
        "kv_transfer_total_bytes", _C, "KV blocks kept for other engines (saved), and taken from them (loaded).",
        ("direction",),
    ),
    MetricName("num_preemptions", _C, "Times a running request was preempted."),
    MetricName("num_recomputed_tokens", _C, "Tokens computed again after a preemption or a worker failure."),
    MetricName(
        "worker_failures", _C, "Worker failures by cause: exited, raised, hung, not_started (the restart "
        "failed), or other_engine (which divides the experts with this one).", ("cause",),
    ),
    MetricName("worker_requests_resumed", _C, "Requests resumed after a worker failure."),
    MetricName("worker_last_pause_seconds", _G, "Time from the latest worker failure until workers were ready."),
    MetricName("prompt_tokens", _C, "Prompt tokens, computed or cached."),
    MetricName(
        "prompt_tokens_by_source", _C, "Prompt tokens by source: local_compute, local_cache_hit, or "
        "external_kv_transfer, which is host memory.",
        ("source",),
    ),
    MetricName("prompt_tokens_cached", _C, "Prompt tokens of finished requests that were in the prefix cache."),
    MetricName("generation_tokens", _C, "Tokens generated."),
    MetricName("spec_decode_num_drafts", _C, "Speculative decoding: times that tokens of a request were drafted."),
    MetricName("spec_decode_num_draft_tokens", _C, "Draft tokens."),
    MetricName("spec_decode_num_accepted_tokens", _C, "Draft tokens accepted: they and all before them were right."),
    MetricName(
        "spec_decode_num_accepted_tokens_per_pos", _C,
        "Draft tokens accepted, by the number of drafts before them in their step, 0 to 15.", ("position",),
    ),
    MetricName("request_success", _C, "Finished requests.", ("finished_reason",)),
    MetricName("corrupted_requests", _C, "Requests that failed because the model's logits contained NaN."),
    MetricName(
        "admission_rejections", _C, "Requests rejected because a queue limit was reached, by limit.",
        ("reason",),
    ),
    MetricName("engine_restarts", _C, "Engine restarts by cause.", ("cause",)),
    MetricName("requests_resumed", _C, "Requests resumed after an engine restart."),
    MetricName("engine_restart_pause_seconds", _G, "How long the latest restart paused requests."),
    MetricName("time_to_first_token_seconds", _H, "From arrival to first token.", (), FIRST_TOKEN_S),
    MetricName(
        "inter_token_latency_seconds", _H, "Between two tokens of a request: the mean within a chunk.",
        (), TOKEN_INTERVAL_S,
    ),
    MetricName(
        "request_time_per_output_token_seconds", _H, "Mean time per token after a request's first.",
        (), TOKEN_INTERVAL_S,
    ),
    MetricName("e2e_request_latency_seconds", _H, "From arrival to last token.", (), REQUEST_LATENCY_S),
    MetricName("request_queue_time_seconds", _H, "Waiting to be scheduled.", (), REQUEST_LATENCY_S),
    MetricName("request_inference_time_seconds", _H, "From first scheduled to last token.", (), REQUEST_LATENCY_S),
    MetricName("request_prefill_time_seconds", _H, "From first scheduled to first token.", (), REQUEST_LATENCY_S),
    MetricName("request_decode_time_seconds", _H, "From first token to last token.", (), REQUEST_LATENCY_S),
    MetricName("request_prompt_tokens", _H, "Prompt tokens of a request.", (), UP_TO_MODEL_LEN),
    MetricName("request_generation_tokens", _H, "Tokens generated for a request.", (), UP_TO_MODEL_LEN),
    MetricName(
        "request_max_num_generation_tokens", _H, "Tokens generated for the longest sequence of a request.", (),
        UP_TO_MODEL_LEN,
    ),
    MetricName(
        "request_prefill_kv_computed_tokens", _H, "Prompt tokens not found in the cache.", (), UP_TO_MODEL_LEN
    ),
    MetricName("request_params_n", _H, "Parameter n of a request.", (), SMALL_COUNTS),
    MetricName("request_params_max_tokens", _H, "Parameter max_tokens of a request.", (), UP_TO_MODEL_LEN),
    MetricName("request_num_preemptions", _H, "Preemptions of a request.", (), PREEMPTION_COUNTS),
    MetricName(
        "iteration_tokens_total", _H,
        "Prompt and generated tokens per step: the mean over each report interval, counted once per step.",
        (), STEP_TOKENS,
    ),
)  # fmt: skip

TENANT_METRICS: tuple[MetricName, ...] = (
    MetricName("tenant_requests", _C, "Requests of a tenant that have started."),
    MetricName("tenant_requests_running", _G, "Those that have not ended."),
    MetricName("tenant_prompt_tokens", _C, "Prompt tokens of a tenant's finished requests."),
    MetricName("tenant_generation_tokens", _C, "Tokens generated for a tenant's finished requests."),
    MetricName(
        "tenant_rejections", _C, "Requests of a tenant that were rejected with 429, by limit: requests_per_minute, "
        "tokens_per_minute or max_concurrent_requests.", ("reason",),
    ),
)  # fmt: skip
"""Metrics of servers with `--tenants`. They have the label `tenant` (its name), and no label of an engine."""


def token_count_buckets(max_model_len: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50, ... up to `max_model_len`."""
    edges: list[float] = []
    scale = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * scale > max_model_len:
                return tuple(edges)
            edges.append(mantissa * scale)
        scale *= 10


def cache_labels(config: ResolvedConfig, num_blocks: int) -> dict[str, str]:
    """Return the labels of `cache_config_info`."""
    return {
        "block_size": str(config.block_size),
        "num_gpu_blocks": str(num_blocks),
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
    }


def render_metrics_docs() -> str:
    """Return `docs/metrics.md`."""
    header = ["| name | kind | further labels | meaning |", "| --- | --- | --- | --- |"]
    return "\n".join(
        [
            "# Metrics",
            "",
            "`GET /metrics` returns Prometheus' text format. Every metric also has the labels `model_name` (the first",
            "served name) and `engine` (the engine's index); `sum without (engine) (...)` is the total of all. A",
            "request that moved counts for the engine that ended it. With `--enable-vllm-metrics` each metric is also",
            "exported under `vllm:`.",
            "With `--api-server-count` every API server process exports the totals of all processes.",
            "This page is generated by `scripts/docs` from `frontend/metrics/names.py`.",
            "",
            *header,
            *map(_row, METRICS),
            "",
            "## Tenants",
            "",
            "A server with `--tenants` ([tenants.md](tenants.md)) exports these too, with the label `tenant`, its",
            "name. They have no label of an engine, and no second name under `vllm:`.",
            "",
            *header,
            *map(_row, TENANT_METRICS),
            "",
        ]
    )


def _row(metric: MetricName) -> str:
    name = metric.name + ("_total" if metric.kind is Kind.COUNTER else "")
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `octavo:{name}` | {metric.kind.value} | {labels} | {metric.help} |"
