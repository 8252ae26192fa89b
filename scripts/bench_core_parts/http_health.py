"""`/health` of a real HTTP frontend over a core without a model, while streams run and requests wait or end."""

import time
from collections.abc import Callable
from contextlib import ExitStack

from own_server import serving

from bench_core_parts.engine import Client, Engine, Process, running_engine
from bench_core_parts.http_callers import callers
from bench_core_parts.messages import prompt_of
from bench_core_parts.probe import probing
from bench_core_parts.scenarios import Figures, engine_sizes, p99

PROMPT_LEN = 100
PROMPTS_PER_CALL = 2
"""Prompts of each waiting call: one process may not have as many connections as requests."""
STEP_S = 0.1
"""Seconds of a step in the worker, so that each stream gets ten tokens a second."""
PHASE_S = 5.0
"""Seconds of each phase in which nothing changes."""


def health(num_streams: int, num_waiting: int, num_lost: int) -> Figures:
    """Return the latency of `/health` and the frontend's processor time during each phase.

    Args:
        num_streams: number of HTTP streams that run all the time.
        num_waiting: number of HTTP requests that arrive, wait and are aborted because their clients disconnect.
        num_lost: number of waiting requests of another frontend, which dies.
    """
    figures: Figures = {}
    with running_engine(STEP_S, **engine_sizes(num_streams, PROMPT_LEN)) as engine, ExitStack() as stack:
        url, pid = stack.enter_context(serving(f"--join={engine.address}", ["--disable-uvicorn-access-log"]))
        frontend, port = Process(pid), int(url.rpartition(":")[2])
        name = f"/health, {num_streams} streams"

        def measure(phase: str, meanwhile: Callable[[], None]) -> None:
            cpu_s, start_s = frontend.cpu_s, time.monotonic()
            with probing(url) as latencies:
                meanwhile()
            elapsed_s = time.monotonic() - start_s
            figures[f"{name}{phase}: p99 ms"] = 1e3 * p99(latencies)
            figures[f"{name}{phase}: max ms"] = 1e3 * max(latencies)
            figures[f"{name}{phase}: s"] = elapsed_s
            figures[f"{name}{phase}: cores of the frontend"] = (frontend.cpu_s - cpu_s) / elapsed_s

        stream = _body(prompt_of(0, PROMPT_LEN), is_stream=True, max_tokens=10_000)
        stack.enter_context(callers(port, num_streams, stream))
        measure("", lambda: time.sleep(PHASE_S))
        prompts = [prompt_of(index, PROMPT_LEN, salt=1) for index in range(PROMPTS_PER_CALL)]
        call = _body(prompts, is_stream=False, max_tokens=16)
        leaving = stack.enter_context(ExitStack())

        def arrive() -> None:
            leaving.enter_context(callers(port, num_waiting // PROMPTS_PER_CALL, call))
            engine.client.wait(lambda stats: stats.num_waiting == num_waiting)

        def leave() -> None:
            leaving.close()
            engine.client.wait(lambda stats: stats.num_waiting == 0)

        measure(f", {num_waiting} requests arrive", arrive)
        measure(f", {num_waiting} wait", lambda: time.sleep(PHASE_S))
        measure(f", {num_waiting} are aborted", leave)
        other = _other_frontend(engine, num_lost)
        measure(f", a frontend with {num_lost} requests dies", lambda: _die(engine, other))
    return figures


def _body(prompt: list, *, is_stream: bool, max_tokens: int) -> dict:
    return {"prompt": prompt, "max_tokens": max_tokens, "stream": is_stream, "ignore_eos": True}


def _other_frontend(engine: Engine, num_requests: int) -> Client:
    other = Client(engine.address)
    other.submit("other", num_requests, PROMPT_LEN, 16)
    engine.client.wait(lambda stats: stats.num_waiting == num_requests)
    return other


def _die(engine: Engine, other: Client) -> None:
    other.close()
    engine.client.wait(lambda stats: stats.num_waiting == 0)
