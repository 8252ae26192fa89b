"""`run_chaos`: one chaos run: the undisturbed answers, the disturbed run, checks for leftovers, and the report."""

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from octavo.frontend.cli.bench.chaos.answer_checker import AnswerChecker
from octavo.frontend.cli.bench.chaos.answers import Answer
from octavo.frontend.cli.bench.chaos.client_pool import ClientPool
from octavo.frontend.cli.bench.chaos.fault_injector import Action, FaultInjector, Injection, Target, plan_injections
from octavo.frontend.cli.bench.chaos.job_runner import JobRunner
from octavo.frontend.cli.bench.chaos.jobs import ChaosJob, ChaosOutcome, ChaosRequest, Result
from octavo.frontend.cli.bench.chaos.processes import Footprint, Process
from octavo.frontend.cli.bench.chaos.server_under_test import API_WORKER, CORE, SERVER, WORKER, ServerUnderTest
from octavo.frontend.cli.bench.chaos.workload import draw_jobs, draw_requests
from octavo.frontend.cli.bench.report import context, print_line, print_table, write_json
from octavo.frontend.cli.errors import CommandError
from octavo.protocol.pooling import PoolingTask

CALM_SETTINGS: dict[str, Any] = {
    "max_num_seqs": 1,
    "async_scheduling": False,
    "enable_prefix_caching": False,
    "kv_offloading_size": 0.0,
    "swap_space": 0.0,
    "kv_offloading_path": None,
    "kv_transfer_config": None,
    "max_num_batched_tokens": 1024,
    "data_parallel_size": 1,
}
"""Settings of the undisturbed engine: one sequence at a time, no chunked prefill, no prefix cache in any tier."""

MAX_GROWTH_BYTES = 64 * 2**20
"""Allowed growth of the largest process of a kind since the first requests."""

MAX_NEW_FILES = 8
"""Allowed growth of the number of open file descriptors since the first requests."""

MODULES = {
    Target.CORE: CORE,
    Target.ALL_CORES: CORE,
    Target.WORKER: WORKER,
    Target.ALL_WORKERS: WORKER,
    Target.HTTP: API_WORKER,
}


@dataclass
class ChaosReport:
    """The result of a run."""

    settings: Mapping[str, Any]
    options: argparse.Namespace
    seed: int
    checker: AnswerChecker
    injector: FaultInjector
    faults: list[str] = field(default_factory=list)
    """Descriptions of failed checks; empty if the run passed."""
    before: dict[str, Footprint] = field(default_factory=dict)
    after: dict[str, Footprint] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def injected(self) -> Counter[tuple[Target, Action]]:
        """Injected faults, counted by target and action."""
        return Counter((fault.injection.target, fault.injection.action) for fault in self.injector.injected)

    def show(self, replay: str) -> None:
        """Print the report as a table.

        Args:
            replay: the command that repeats the run.
        """
        counts = self.checker.counts
        rows: list[tuple[str, int | float | str]] = [("Requests", self.options.requests)]
        rows += [(what.capitalize(), count) for what, count in sorted(counts.items())]
        rows += [
            (f"{target.capitalize()} {action}", count) for (target, action), count in sorted(self.injected.items())
        ]
        rows += [("Requests in flight at an injection, mean", self._mean_live())]
        for role, held in self.after.items():
            grown = (held.memory_bytes - self.before[role].memory_bytes) / 2**20 if role in self.before else 0.0
            rows.append((f"{role.capitalize()}: growth (MiB)", grown))
        rows += [(f"{phase.capitalize()} (s)", seconds) for phase, seconds in self.seconds.items()]
        rows.append(("Faults", len(self.faults)))
        print_table("Chaos", rows)
        for fault in self.faults:
            print_line(f"fault: {fault}")
        if self.faults:
            print_line(f"to repeat: {replay}")

    def write(self, path: str, replay: str) -> None:
        """Write the complete report to a file.

        Raises:
            CommandError: the file cannot be written.
        """
        injected = [
            {
                "target": fault.injection.target,
                "action": fault.injection.action,
                "processes": fault.num_hit,
                "time_s": fault.time_s,
                "live": fault.num_live,
            }
            for fault in self.injector.injected
        ]
        document: dict[str, Any] = {
            **context(),
            "model_id": self.settings["model"],
            "settings": dict(self.settings),
            "seed": self.seed,
            "replay": replay,
            "requests": self.options.requests,
            "clients": self.options.clients,
            "counts": dict(self.checker.counts),
            "strikes": injected,
            "footprints": {
                role: {
                    "memory_bytes": [
                        self.before[role].memory_bytes if role in self.before else None,
                        held.memory_bytes,
                    ],
                    "num_files": [self.before[role].num_files if role in self.before else None, held.num_files],
                }
                for role, held in self.after.items()
            },
            "seconds": self.seconds,
            "faults": self.faults,
            "findings": self.checker.findings,
        }
        write_json(path, document)

    def _mean_live(self) -> float:
        injected = self.injector.injected
        return sum(fault.num_live for fault in injected) / len(injected) if injected else 0.0


def run_chaos(
    settings: Mapping[str, Any],
    options: argparse.Namespace,
    directory: Path,
    logs: Path,
    seed: int,
    tasks: Sequence[PoolingTask] = (),
) -> ChaosReport:
    """Run both engines and return the report.

    Args:
        settings: the settings of the engine, including the model.
        options: the options of the run.
        directory: directory for sockets and settings files.
        logs: directory for the logs of servers and clients.
        seed: determines requests, client behavior and injected faults.
        tasks: the tasks of a pooling model; () for a model that generates.

    Raises:
        CommandError: an engine or a client did not start, or failed.
    """
    return asyncio.run(_run_chaos(settings, options, directory, logs, seed, tasks))


async def _run_chaos(
    settings: Mapping[str, Any],
    options: argparse.Namespace,
    directory: Path,
    logs: Path,
    seed: int,
    tasks: Sequence[PoolingTask],
) -> ChaosReport:
    distinct = options.distinct or max(1, options.requests // 4)
    requests = draw_requests(seed, min(distinct, options.requests), tasks)
    jobs = draw_jobs(seed, requests, options.requests)
    with (logs / "clients.log").open("wb") as errors:
        started = time.monotonic()
        expected, findings = await _answers_alone(settings, options, directory, logs, requests, errors)
        calm_s = time.monotonic() - started
        if findings:
            raise CommandError(f"the undisturbed engine failed a request: {findings[0]}")
        started = time.monotonic()
        report = await _disturb(settings, options, directory, logs, seed, jobs, expected, errors)
    report.seconds = {"undisturbed answers": calm_s, "storm": time.monotonic() - started}
    return report


async def _answers_alone(
    settings: Mapping[str, Any],
    options: argparse.Namespace,
    directory: Path,
    logs: Path,
    requests: Sequence[ChaosRequest],
    errors: BinaryIO,
) -> tuple[dict[int, Answer], list[str]]:
    """Return the undisturbed answer to each request by number, and the failures."""
    server = ServerUnderTest({**settings, **CALM_SETTINGS}, directory / "calm", logs / "calm.log")
    expected: dict[int, Answer] = {}
    faults: list[str] = []

    def take(job: ChaosJob, result: Result) -> bool:
        if result.outcome is ChaosOutcome.ANSWERED and result.answer is not None:
            expected[job.number] = result.answer
        else:
            faults.append(f"{result.detail or result.outcome}: {job.request.body}")
        return False

    # Enough clients to keep the engine busy, although it serves one sequence at a time.
    clients = None
    try:
        await server.wait_until_ready()
        clients = ClientPool(server.url, server.addresses, 1, 8, options.timeout, errors)
        await clients.start()
        jobs = [ChaosJob(request.number, request) for request in requests]
        with _bar(len(jobs), "undisturbed", options) as bar:
            await _run_on(server, JobRunner(clients, jobs, take, lambda job: None, 0, on_ended=bar.update))
        await clients.close()
        await server.stop()
    finally:
        if clients:
            await clients.close()
        server.kill()
    return expected, faults


async def _disturb(
    settings: Mapping[str, Any],
    options: argparse.Namespace,
    directory: Path,
    logs: Path,
    seed: int,
    jobs: Sequence[ChaosJob],
    expected: Mapping[int, Answer],
    errors: BinaryIO,
) -> ChaosReport:
    """Run all jobs on an engine whose processes are killed and stopped."""
    served = {**settings, "api_server_count": options.server_processes}
    server = ServerUnderTest(served, directory / "storm", logs / "server.log")
    clients = None
    try:
        await server.wait_until_ready()
        clients = ClientPool(
            server.url, server.addresses, options.client_processes, options.clients, options.timeout, errors
        )
        report = await _run_jobs(settings, options, seed, server, clients, jobs, expected)
        await clients.close()
        report.faults += await server.stop()
        report.faults += [f"the server's log contains: {line}" for line in server.faults_in_log()]
    finally:
        if clients:
            await clients.close()
        server.kill()
    return report


async def _run_jobs(
    settings: Mapping[str, Any],
    options: argparse.Namespace,
    seed: int,
    server: ServerUnderTest,
    clients: ClientPool,
    jobs: Sequence[ChaosJob],
    expected: Mapping[int, Answer],
) -> ChaosReport:
    num_first = min(len(jobs) // 10 + 1, options.clients)
    targets = _targets(server, options)
    hang_s = 2.0 * max(settings["core_timeout"], settings["execute_model_timeout"]) + 2.0
    injections: list[Injection] = plan_injections(seed, len(jobs) - num_first, options.kills, targets, hang_s)

    def find(injection: Injection) -> list[Process]:
        if injection.target is Target.APPLICATION:
            return clients.applications
        if injection.target is Target.WORKER:
            return server.workers_of_rank(injection.number % server.num_ranks)
        if injection.target.hits_all:
            found = server.processes(MODULES[injection.target])
            return found if len(found) == _num_hit(server, injection.target) else []
        # The first HTTP process is the parent of all others: stop it, never kill it.
        first = server.processes(SERVER) if injection.target is Target.HTTP and injection.action is Action.STOP else []
        return [*first, *server.processes(MODULES[injection.target])]

    injector = FaultInjector(injections, seed, find, lambda: clients.num_live)
    checker = AnswerChecker(expected, injector.explains_break)
    report = ChaosReport(settings, options, seed, checker, injector)
    await clients.start()
    with _bar(len(jobs), "disturbed", options) as bar:
        for part, disturber in ((jobs[:num_first], None), (jobs[num_first:], injector)):
            take, on_client_death = checker.take, checker.on_client_death
            runner = JobRunner(clients, part, take, on_client_death, options.clients, disturber, on_ended=bar.update)
            await _run_on(server, runner)
            if disturber is None:
                report.faults += _idle_faults(await server.wait_until_idle(), "the first requests")
                report.before = server.footprints()
    report.faults += _idle_faults(await server.wait_until_idle(), "the storm")
    report.after = server.footprints()
    report.faults += [f"request {one['job']['number']}: {one['what']} {one['detail']}" for one in checker.findings]
    report.faults += [f"no process was found for an injection: {injection}" for injection in injector.missed]
    report.faults += _growth(report)
    return report


def _targets(server: ServerUnderTest, options: argparse.Namespace) -> list[Target]:
    """Return the possible targets. "all" is omitted if it would hit only one process."""
    targets = [Target.WORKER, Target.CORE, Target.APPLICATION]
    if options.server_processes > 1:
        targets.append(Target.HTTP)
    return targets + [target for target in (Target.ALL_WORKERS, Target.ALL_CORES) if _num_hit(server, target) > 1]


def _num_hit(server: ServerUnderTest, target: Target) -> int:
    return server.num_engines * (server.num_ranks if target is Target.ALL_WORKERS else 1)


async def _run_on(server: ServerUnderTest, runner: JobRunner) -> None:
    """Run all jobs; fail if the server exits.

    Raises:
        CommandError: the server exited, or a client process failed.
    """
    watching = asyncio.create_task(server.wait_for_end(), name="server's end")
    watching.add_done_callback(lambda task: None if task.cancelled() else runner.fail(task.result()))
    try:
        await runner.run()
    finally:
        watching.cancel()


def _idle_faults(trouble: str, after: str) -> list[str]:
    return [f"the engine did not become idle after {after}: {trouble}"] if trouble else []


def _growth(report: ChaosReport) -> list[str]:
    faults = []
    for role, before in report.before.items():
        after = report.after.get(role)
        if after is None:
            faults.append(f"there is no {role} after the run")
            continue
        if after.memory_bytes > before.memory_bytes + MAX_GROWTH_BYTES:
            faults.append(f"a {role} grew from {before.memory_bytes >> 20} to {after.memory_bytes >> 20} MiB")
        if after.num_files > before.num_files + MAX_NEW_FILES:
            faults.append(f"a {role} has {after.num_files} open files after the run, {before.num_files} before")
    return faults


def _bar(total: int, what: str, options: argparse.Namespace) -> "tqdm[Any]":
    return tqdm(total=total, desc=what, unit="request", disable=True if options.disable_tqdm else None)
