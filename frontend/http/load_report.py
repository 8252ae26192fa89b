"""The load of the engines as a response header, in ORCA's formats for load balancers."""

import msgspec
from starlette.types import Scope

from octavo.frontend.http.request import header_value
from octavo.protocol.stats import EngineStats

FORMAT_HEADER = b"endpoint-load-metrics-format"
REPORT_HEADER = "endpoint-load-metrics"
FORMATS = ("TEXT", "JSON")


def load_format(scope: Scope) -> str:
    """Return the format in which a request asks for the load; "" if it names no known format."""
    wanted = header_value(scope, FORMAT_HEADER).upper()
    return wanted if wanted in FORMATS else ""


def load_report(wanted: str, stats: EngineStats) -> str:
    """Return the value of `REPORT_HEADER`, with vLLM's names; `wanted` is one of `FORMATS`."""
    used = 1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0
    metrics = {"kv_cache_usage_perc": round(used, 6), "num_requests_waiting": float(stats.num_waiting)}
    if wanted == "JSON":
        report = msgspec.json.encode({"named_metrics": metrics}).decode()
    else:
        report = ", ".join([f"named_metrics.{name}={value}" for name, value in metrics.items()])
    return f"{wanted} {report}"
