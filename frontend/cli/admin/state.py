"""`octavo admin state`: shows an engine's model, load and counters."""

import msgspec

from octavo.frontend.cli.admin.engine_socket import add_engine_flags, call_engines, print_by_engine
from octavo.frontend.cli.parser import CommandParser
from octavo.protocol.admin import ListRequests, RequestRows
from octavo.protocol.events import UtilityResult
from octavo.protocol.requests import GetStats
from octavo.protocol.stats import EngineStats
from octavo.protocol.weights import GetWeights, WeightsStatus


def parser() -> CommandParser:
    """Return the flags of `octavo admin state`."""
    parser = CommandParser("octavo admin state", "Show the load, the weights and the counters of an engine.")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each engine, with all counters")
    add_engine_flags(parser)
    return parser


def run(argv: list[str]) -> int:
    """Print the state; return the exit code.

    Raises:
        OctavoError: an engine does not respond.
    """
    options = parser().parse(argv)
    results = call_engines(options, GetStats(), GetWeights(), ListRequests(0), takes_all=True)
    if options.json:
        for address, of_engine in results.items():
            print(_json(address, of_engine))
    else:
        print_by_engine(results, _render)
    return 0


def _parts(results: list[UtilityResult]) -> tuple[EngineStats, WeightsStatus, RequestRows]:
    stats, weights, rows = results
    assert isinstance(stats, EngineStats) and isinstance(weights, WeightsStatus) and isinstance(rows, RequestRows)
    return stats, weights, rows


def _json(address: str, results: list[UtilityResult]) -> str:
    stats, weights, rows = _parts(results)
    counters = {name: getattr(stats, name) for name in stats.__struct_fields__}
    status = {name: getattr(weights, name) for name in weights.__struct_fields__}
    state = {"address": address, "is_draining": rows.is_draining, "stats": counters, "weights": status}
    return msgspec.json.encode(state).decode()


def _render(results: list[UtilityResult]) -> str:
    stats, weights, rows = _parts(results)
    state = "draining" if rows.is_draining else "asleep" if weights.sleep_level else "serving"
    if weights.is_paused and state == "serving":
        state = "paused"
    hits, queries = stats.prefix_cache_hits, stats.prefix_cache_queries
    lines = {
        "state": f"{state} ({weights.fault})" if weights.fault else state,
        "requests": f"{stats.num_running} running, {stats.num_waiting} waiting"
        + (f" (the first for {stats.waiting_reason})" if stats.waiting_reason else ""),
        "KV cache": f"{stats.kv_cache_usage:.1%} of {stats.num_blocks} blocks in use",
        "prefix cache": f"{hits} of {queries} prompt tokens found" if queries else "not used yet",
        "tokens": f"{stats.prompt_tokens} prompt, {stats.generation_tokens} generated, in {stats.num_steps} steps",
        "preemptions": str(stats.num_preemptions),
        "worker failures": str(sum(stats.worker_failures.values())),
        "weights": f"version {weights.version}" + (f" ({weights.label})" if weights.label else ""),
    }
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())
