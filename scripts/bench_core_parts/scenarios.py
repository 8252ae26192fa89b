"""The measurements: each function starts the processes that it needs, and returns figures by name."""

import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from bench_core_parts.engine import Client, Engine, running_engine
from bench_core_parts.messages import engine_config, prompt_of, result_of, submission
from bench_core_parts.probe import probing
from octavo.core_proc.collector import IdleCollector
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.protocol.config import CachePlan

Figures: TypeAlias = dict[str, float]

BLOCK_SIZE = 16
MAX_CACHE_TOKENS = 2**24
MAX_OUTPUT_TOKENS = 2**16
MIN_BATCHED_TOKENS = 8192
MIN_STEPS = 40
NUM_WINDOWS = 5
NUM_TURNS = 7
PROBE_S = 1.0
LARGE_PROMPT = 32_000
FLOOD_MESSAGES = 256


def steps(num_running: int, waiting: Iterable[int], prompt_len: int, window_s: float) -> Figures:
    """Processor time of the core for each step of running decodes, while others wait."""
    figures: Figures = {}
    with running_engine(**engine_sizes(num_running, prompt_len)) as engine:
        _start_running(engine, num_running, prompt_len)
        num_waiting = 0
        for target in waiting:
            engine.client.submit(f"w{target}-", target - num_waiting, prompt_len, 16)
            num_waiting = target
            engine.client.wait(lambda stats, target=target: stats.num_waiting == target)
            engine.client.drain()
            us_per_step = _us_per_step(engine, num_running, window_s)
            name = f"core, {num_running} running, {target} waiting, prompts of {prompt_len}"
            figures[f"{name}: us/step"] = us_per_step
            figures[f"{name}: us/token"] = us_per_step / num_running
    return figures


def queue_ratio(num_running: int, num_waiting: int, window_s: float) -> Figures:
    """Processor time of a step with and without a queue. Two cores take turns, so that noise affects both alike."""
    sizes = engine_sizes(num_running, 100)
    values: dict[int, list[float]] = {0: [], num_waiting: []}
    with running_engine(**sizes) as empty, running_engine(**sizes) as full:
        for engine in (empty, full):
            _start_running(engine, num_running, 100)
        full.client.submit("w", num_waiting, 100, 16)
        full.client.wait(lambda stats: stats.num_waiting == num_waiting)
        for _ in range(NUM_TURNS):
            with full.worker_paused():
                values[0].append(_us_per_step(empty, num_running, window_s))
            with empty.worker_paused():
                values[num_waiting].append(_us_per_step(full, num_running, window_s))
    empty_us, full_us = (statistics.median(several) for several in values.values())
    name = f"core, {num_running} running, in turns"
    return {
        f"{name}, 0 waiting: us/step": empty_us,
        f"{name}, {num_waiting} waiting: us/step": full_us,
        f"{name}, {num_waiting} waiting: % more than 0": 100 * (full_us / empty_us - 1),
    }


def plan_and_commit(num_running: int, window_s: float) -> Figures:
    """Processor time of the scheduler alone for each step of running decodes."""
    sizes = engine_sizes(num_running, 100)
    config = engine_config(**sizes)
    plan = CachePlan(
        blocks_per_group=[sizes["num_blocks"]],
        block_size=BLOCK_SIZE,
        max_model_len=config.max_model_len,
        kv_cache_bytes=0,
    )
    scheduler = Scheduler(config, plan, time.monotonic)
    for index in range(num_running):
        failures = scheduler.submit(
            b"client", submission(f"r{index}", prompt_of(index, 100), _max_tokens(num_running) - 64)
        )
        assert not failures, failures
    while scheduler.counters.prompt_tokens < 100 * num_running:
        _step(scheduler)
    IdleCollector().start(time.monotonic())  # as in the core
    values = []
    for _ in range(NUM_WINDOWS):
        num_steps = 0
        start_s = used_s = time.process_time()
        while num_steps < MIN_STEPS / NUM_WINDOWS or used_s - start_s < window_s / NUM_WINDOWS:
            _step(scheduler)
            num_steps += 1
            used_s = time.process_time()
        values.append(1e6 * (used_s - start_s) / num_steps)
    assert len(scheduler.running) == num_running
    return {f"plan + commit, {num_running} running: us/step": statistics.median(values)}


def _step(scheduler: Scheduler) -> None:
    plan = scheduler.plan()
    assert plan is not None
    scheduler.commit(result_of(plan))


def queue(count: int, prompt_len: int, num_aborts: int) -> Figures:
    """Intake, memory and abort of waiting requests, without steps in between; and the stalls of the loop."""
    name = f"{count} waiting, prompts of {prompt_len}"
    figures: Figures = {}
    with running_engine(**engine_sizes(1, max(prompt_len, LARGE_PROMPT))) as engine:
        _start_running(engine, 1, 100)
        with engine.worker_paused():
            _measure_intake(engine, name, count, prompt_len, figures)
            _measure_aborts(engine, name, count, num_aborts, figures)
            _measure_loss(engine, name, count - num_aborts, figures)
    return figures


def frontend_memory(count: int, prompt_len: int) -> Figures:
    """Memory of a frontend's connection for waiting requests."""
    with running_engine(**engine_sizes(1, max(prompt_len, LARGE_PROMPT))) as engine:
        _start_running(engine, 1, 100)
        with engine.worker_paused():
            scripts = str(Path(__file__).parent.parent)
            output = subprocess.run(
                [sys.executable, "-P", "-m", "bench_core_parts.frontend_memory", engine.address, str(count),
                 str(prompt_len)],
                env={**os.environ, "PYTHONPATH": scripts}, capture_output=True, text=True, check=True,
            ).stdout  # fmt: skip
    return {f"frontend, {count} waiting, prompts of {prompt_len}: bytes/token": json.loads(output)}


def flood(num_running: int) -> Figures:
    """Stalls of the loop while large messages flood it between steps."""
    with running_engine(**engine_sizes(num_running, LARGE_PROMPT)) as engine:
        _start_running(engine, num_running, 100)
        attacker = Client(engine.address)
        attacker.stats()
        calm = _probe_running(engine, lambda: time.sleep(PROBE_S))
        flooded = _probe_running(engine, lambda: _flood(attacker))
        attacker.close()
    name = f"probe, {num_running} running"
    large = f"{FLOOD_MESSAGES} x {LARGE_PROMPT} tokens arrive"
    return {
        f"{name}: p99 ms": 1e3 * p99(calm),
        f"{name}: max ms": 1e3 * max(calm),
        f"{name}, {large}: p99 ms": 1e3 * p99(flooded),
        f"{name}, {large}: max ms": 1e3 * max(flooded),
    }


def engine_sizes(num_running: int, prompt_len: int) -> dict[str, int]:
    """Return the settings of an engine that holds this many running requests without preemption."""
    max_tokens = _max_tokens(num_running)
    return {
        "num_blocks": num_running * (-(-(prompt_len + max_tokens) // BLOCK_SIZE) + 1) + 4096,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": num_running,
        "max_num_batched_tokens": max(MIN_BATCHED_TOKENS, num_running),
        "max_model_len": prompt_len + max_tokens,
    }


def _max_tokens(num_running: int) -> int:
    """Return a token limit for running requests: more than they will reach, but within the cache."""
    return min(MAX_OUTPUT_TOKENS, MAX_CACHE_TOKENS // num_running)


def _start_running(engine: Engine, count: int, prompt_len: int) -> None:
    engine.client.submit("r", count, prompt_len, _max_tokens(count) - 64)
    engine.client.wait(lambda stats: stats.num_running == count and stats.prompt_tokens >= count * prompt_len)


def _us_per_step(engine: Engine, num_running: int, window_s: float) -> float:
    """Return the median over several windows, because other work on the machine slows some of them down."""
    client = engine.client
    stats, cpu_s = client.stats(), engine.process.cpu_s
    values = []
    for _ in range(NUM_WINDOWS):
        deadline, num_tokens = time.monotonic() + window_s / NUM_WINDOWS, client.num_tokens
        while time.monotonic() < deadline or client.num_tokens - num_tokens < MIN_STEPS / NUM_WINDOWS * num_running:
            client.receive(1.0)
        earlier, earlier_s = stats, cpu_s
        stats, cpu_s = client.stats(), engine.process.cpu_s
        values.append(1e6 * (cpu_s - earlier_s) / (stats.num_steps - earlier.num_steps))
    if client.num_ended or stats.num_running != num_running:
        raise RuntimeError(f"requests have ended while steps were measured: {client.ended}")
    return statistics.median(values)


def _measure_intake(engine: Engine, name: str, count: int, prompt_len: int, figures: Figures) -> None:
    rss_bytes, cpu_s = engine.process.rss_bytes, engine.process.cpu_s
    with probing(engine.address) as latencies:
        start_s = time.monotonic()
        engine.client.submit("w", count, prompt_len, 16)
        engine.client.wait(lambda stats: stats.num_waiting == count)
        elapsed_s = time.monotonic() - start_s
    figures[f"{name}: intake us/request"] = 1e6 * (engine.process.cpu_s - cpu_s) / count
    figures[f"{name}: intake requests/s"] = count / elapsed_s
    figures[f"{name}: intake, probe p99 ms"] = 1e3 * p99(latencies)
    figures[f"{name}: intake, probe max ms"] = 1e3 * max(latencies)
    figures[f"{name}: core bytes/token"] = (engine.process.rss_bytes - rss_bytes) / (count * prompt_len)


def _measure_aborts(engine: Engine, name: str, count: int, num_aborts: int, figures: Figures) -> None:
    cpu_s = engine.process.cpu_s
    with probing(engine.address) as latencies:
        start_s = time.monotonic()
        engine.client.abort("w", num_aborts)
        while engine.client.num_ended < num_aborts:
            if engine.client.receive(30.0) is None:
                raise TimeoutError("the aborted requests do not end")
        elapsed_s = time.monotonic() - start_s
    figures[f"{name}: abort of {num_aborts}, s"] = elapsed_s
    figures[f"{name}: abort us/request"] = 1e6 * (engine.process.cpu_s - cpu_s) / num_aborts
    figures[f"{name}: abort, probe max ms"] = 1e3 * max(latencies)


def _measure_loss(engine: Engine, name: str, count: int, figures: Figures) -> None:
    witness = Client(engine.address)
    witness.stats()
    cpu_s = engine.process.cpu_s
    with probing(engine.address) as latencies:
        engine.client.close()
        witness.wait(lambda stats: stats.num_waiting == 0)
    witness.close()
    figures[f"{name}: loss of their frontend us/request"] = 1e6 * (engine.process.cpu_s - cpu_s) / count
    figures[f"{name}: loss, probe max ms"] = 1e3 * max(latencies)


def _probe_running(engine: Engine, meanwhile) -> list[float]:
    """Probe while `meanwhile` runs and the events of running requests are read."""
    with probing(engine.address) as latencies:
        thread = threading.Thread(target=meanwhile)
        thread.start()
        while thread.is_alive():
            engine.client.receive(0.01)
        thread.join()
    return latencies


def _flood(attacker: Client) -> None:
    attacker.submit("f", FLOOD_MESSAGES, LARGE_PROMPT, 16)
    attacker.wait(lambda stats: stats.num_waiting == FLOOD_MESSAGES)


def p99(values: list[float]) -> float:
    """Return the 99th percentile."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]
