"""`octavo bench serve`: measures a running OpenAI-compatible server, with the flags of `vllm bench serve`."""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

from octavo.frontend.cli.api import Api
from octavo.frontend.cli.bench.arrivals import add_arrival_flags, arrivals_of
from octavo.frontend.cli.bench.datasets import SampleRequest, add_dataset_flags, draw_samples
from octavo.frontend.cli.bench.figures import METRICS, Outcome, summarize
from octavo.frontend.cli.bench.report import context, print_line, print_table, write_json
from octavo.frontend.cli.bench.speculation import SpeculationMeter, speculation_rows
from octavo.frontend.cli.bench.tokenizers import tokenizer_for
from octavo.frontend.cli.errors import CommandError
from octavo.frontend.cli.parser import CommandParser
from octavo.frontend.cli.terminal import json_object
from octavo.protocol.env import Env

ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-embeddings": "/v1/embeddings",
}

CHECK_INTERVAL_S = 0.5

_DESCRIPTION = """\
Send requests to a running server, octavo or any other with OpenAI's API, and report throughput and latencies. Prompts
are sent as text. Their lengths come from --tokenizer, or from the server's /tokenize and /detokenize by default."""


def parser() -> CommandParser:
    """Return the flags of `octavo bench serve`."""
    parser = CommandParser("octavo bench serve", _DESCRIPTION)
    _add_server_flags(parser)
    add_dataset_flags(parser)
    add_arrival_flags(parser)
    _add_request_flags(parser)
    _add_result_flags(parser)
    return parser


def _add_server_flags(parser: CommandParser) -> None:
    group = parser.add_named_group("server", "The server")
    group.add_argument(
        "--backend",
        choices=list(ENDPOINTS),
        default="openai",
        help="API to use: completions (openai), chat (openai-chat) or vectors (openai-embeddings)",
    )
    group.add_argument("--base-url", metavar="URL", help="http://HOST:PORT or unix:PATH, instead of host and port")
    group.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="default: 8000")
    group.add_argument("--endpoint", metavar="PATH", help="default: the backend's")
    group.add_argument(
        "--header", action="append", default=[], metavar="NAME=VALUE", help="extra request header (repeatable)"
    )
    group.add_argument(
        "--api-key", metavar="KEY", help="sent as the bearer token; default: OCTAVO_API_KEY, else VLLM_API_KEY"
    )
    group.add_argument("--model", metavar="NAME", help="model name; default: the server's first model")
    group.add_argument("--tokenizer", metavar="DIR", help="tokenizer of the model; default: the server's")
    group.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=0.0,
        metavar="X",
        help="wait up to X seconds until the server responds",
    )


def _add_request_flags(parser: CommandParser) -> None:
    group = parser.add_named_group("request", "The requests")
    group.add_argument(
        "--ignore-eos", action="store_true", help="generate past the end-of-sequence token, up to the requested length"
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="default: 0")
    group.add_argument("--top-p", type=float, metavar="X", help="default: the server's")
    group.add_argument("--top-k", type=int, metavar="N", help="default: the server's")
    group.add_argument("--logprobs", type=int, metavar="N", help="request N logprobs per token")
    group.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON", help="additional fields of each request"
    )


def _add_result_flags(parser: CommandParser) -> None:
    group = parser.add_named_group("results", "The report")
    group.add_argument(
        "--percentile-metrics",
        type=_metrics,
        default=list(METRICS),
        metavar="NAMES",
        help=f"latencies to report, from {','.join(METRICS)}; default: all",
    )
    group.add_argument(
        "--metric-percentiles",
        type=_percents,
        default=[99.0],
        metavar="LIST",
        help="percentiles to report, such as 50,90,99; default: 99",
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        type=_target,
        default=[],
        metavar="NAME:MS",
        help="report the requests per second that meet all targets in milliseconds, such as ttft:200 tpot:50",
    )
    group.add_argument("--save-result", action="store_true", help="write the result to a JSON file")
    group.add_argument("--save-detailed", action="store_true", help="include the times and the text of each request")
    group.add_argument(
        "--result-dir", default=".", metavar="DIR", help="directory of the result file; default: the current one"
    )
    group.add_argument("--result-filename", metavar="FILE", help="default: made from backend, rate, model and date")
    group.add_argument(
        "--metadata", nargs="*", default=[], metavar="NAME=VALUE", help="additional fields of the result file"
    )
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def run(argv: list[str]) -> int:
    """Run the benchmark and print the report. Return the exit code: 1 if a request failed.

    Raises:
        CommandError: the server does not respond, or the workload cannot be created.
    """
    options = parser().parse(argv)
    if options.max_concurrency is not None and options.max_concurrency < 1:
        raise CommandError("--max-concurrency must be 1 or more")
    url = options.base_url or f"http://{options.host}:{options.port}"
    key = options.api_key or Env.read().api_key
    api = Api(url, key)
    _wait_for(api, options.ready_check_timeout_sec)
    model = api.model(options.model)
    samples = draw_samples(options, tokenizer_for(options.tokenizer, api, model), options.seed)
    headers = dict(_pair(text, "--header") for text in options.header)
    if key:
        headers["authorization"] = f"Bearer {key}"
    # Warm-ups resemble the workload but share no prefix with it: the prefix cache must be cold when the measurement
    # starts.
    warmups = [
        SampleRequest(sample.prompt[::-1], sample.max_tokens) for sample in samples[: max(1, options.num_warmups)]
    ]
    bodies, warmup_bodies = (
        [json.dumps(request_body(options, model, sample)).encode() for sample in several]
        for several in (samples, warmups)
    )
    arrivals_s = arrivals_of(options, len(samples))
    endpoint = options.endpoint or ENDPOINTS[options.backend]
    print_line(f"{len(samples)} requests to {model} at {url}{endpoint}")
    # Imported late because `--help` and completion need no asyncio.
    from octavo.frontend.cli.bench.load import Target, measure

    meter = SpeculationMeter(api)
    duration_s, outcomes = measure(
        Target(url, endpoint, headers, is_streamed=options.backend != "openai-embeddings"),
        bodies,
        warmup_bodies,
        arrivals_s,
        options.max_concurrency,
        has_bar=not options.disable_tqdm,
        on_warm=meter.start,
    )
    speculation = meter.figures()
    figures = summarize(
        outcomes, duration_s, options.percentile_metrics, options.metric_percentiles, dict(options.goodput)
    )
    print_table("Serving benchmark", _rows(figures, options))
    if speculation:
        print_table("Speculative decoding", speculation_rows(speculation))
        figures |= speculation
    if options.save_result or options.result_filename:
        _save(options, model, figures, outcomes)
    if error := next((outcome.error for outcome in outcomes if outcome.error), None):
        raise CommandError(f"{figures['failed']} of {len(outcomes)} requests failed, the first with: {error}")
    return 0


def request_body(options: argparse.Namespace, model: str, sample: SampleRequest) -> dict[str, Any]:
    """Return the request body of a sample request."""
    if options.backend == "openai-embeddings":
        return {"model": model, "input": sample.prompt, **options.extra_body}
    is_chat = options.backend == "openai-chat"
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": sample.max_tokens,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if is_chat:
        body["messages"] = [{"role": "user", "content": sample.prompt}]
    else:
        body["prompt"] = sample.prompt
    if options.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": options.logprobs} if is_chat else {"logprobs": options.logprobs}
    sampling = {name: getattr(options, name) for name in ("top_p", "top_k") if getattr(options, name) is not None}
    if options.ignore_eos:
        sampling["ignore_eos"] = True
    return {**body, **sampling, **options.extra_body}


def _wait_for(api: Api, timeout_s: float) -> None:
    """Wait until the server responds.

    Raises:
        CommandError: the server did not respond in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            api.get("/v1/models")
            return
        except CommandError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(CHECK_INTERVAL_S)


def _rows(figures: dict[str, Any], options: argparse.Namespace) -> list[tuple[str, int | float | str]]:
    rows = [
        ("Successful requests", figures["completed"]),
        ("Failed requests", figures["failed"]),
        ("Benchmark duration (s)", figures["duration"]),
        ("Total input tokens", figures["total_input_tokens"]),
        ("Input tokens from the prefix cache", figures["total_cached_tokens"]),
        ("Total generated tokens", figures["total_output_tokens"]),
        ("Request throughput (req/s)", figures["request_throughput"]),
        ("Output token throughput (tok/s)", figures["output_throughput"]),
        ("Total token throughput (tok/s)", figures["total_token_throughput"]),
        ("Peak concurrent requests", figures["max_concurrent_requests"]),
    ]
    if figures["request_goodput"] is not None:
        rows.append(("Request goodput (req/s)", figures["request_goodput"]))
    for metric in options.percentile_metrics:
        kinds = ["mean", "median", *(f"p{percent:g}" for percent in options.metric_percentiles)]
        rows += [(f"{kind.capitalize()} {metric.upper()} (ms)", figures[f"{kind}_{metric}_ms"]) for kind in kinds]
    return rows


def _save(options: argparse.Namespace, model: str, figures: dict[str, Any], outcomes: list[Outcome]) -> None:
    document: dict[str, Any] = {
        **context(),
        "backend": options.backend,
        "model_id": model,
        "tokenizer_id": options.tokenizer,
        "dataset_name": options.dataset_name,
        "num_prompts": options.num_prompts,
        # JSON has no infinity.
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "ramp_up_strategy": options.ramp_up_strategy,
        "ramp_up_start_rps": options.ramp_up_start_rps,
        "ramp_up_end_rps": options.ramp_up_end_rps,
        "max_concurrency": options.max_concurrency,
        "goodput": dict(options.goodput) or None,
        "seed": options.seed,
        **dict(_pair(text, "--metadata") for text in options.metadata),
        **figures,
    }
    if options.save_detailed:
        document |= {
            "input_lens": [outcome.num_prompt_tokens for outcome in outcomes],
            "output_lens": [outcome.num_output_tokens for outcome in outcomes],
            "ttfts": [(outcome.text_times or [outcome.finished])[0] - outcome.sent for outcome in outcomes],
            "itls": [[gap / 1e3 for gap in outcome.latencies().get("itl", [])] for outcome in outcomes],
            "generated_texts": [outcome.text for outcome in outcomes],
            "errors": [outcome.error for outcome in outcomes],
        }
    concurrency = f"-concurrency{options.max_concurrency}" if options.max_concurrency else ""
    short_name = model.rstrip("/").rpartition("/")[2]
    name = f"{options.backend}-{options.request_rate:g}qps{concurrency}-{short_name}-{document['date']}.json"
    write_json(Path(options.result_dir) / (options.result_filename or name), document)


def _pair(text: str, flag: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise CommandError(f"{flag} expects NAME=VALUE, not {text!r}")
    return name, value


def _metrics(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if wrong := set(names) - set(METRICS):
        raise argparse.ArgumentTypeError(f"{min(wrong)!r} is not one of {', '.join(METRICS)}")
    return names


def _percents(text: str) -> list[float]:
    try:
        percents = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers") from None
    if not all(0 <= percent <= 100 for percent in percents):
        raise argparse.ArgumentTypeError("percentiles must be between 0 and 100")
    return percents


def _target(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in METRICS:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME:MS with a NAME from {', '.join(METRICS)}")
    try:
        target_ms = float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number of milliseconds") from None
    if not target_ms >= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a target must not be negative")
    return name, target_ms
