"""`try_engine`: one run from the undisturbed answers to what is left when the engine has ended, and its report."""

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from octavo.frontend.cli.bench.chaos.answers import Answer
from octavo.frontend.cli.bench.chaos.crew import Crew
from octavo.frontend.cli.bench.chaos.jobs import Fate, Job, Request, Result
from octavo.frontend.cli.bench.chaos.judge import Judge
from octavo.frontend.cli.bench.chaos.monkey import Action, Monkey, Strike, Target, plan_strikes
from octavo.frontend.cli.bench.chaos.processes import Footprint, Process
from octavo.frontend.cli.bench.chaos.storm import Storm
from octavo.frontend.cli.bench.chaos.subject import CORE, SERVER, SIBLING, WORKER, Subject
from octavo.frontend.cli.bench.chaos.workload import draw_jobs, draw_requests
from octavo.frontend.cli.bench.report import context, say, say_table, write_json
from octavo.frontend.cli.errors import CommandError

CALM_SETTINGS: dict[str, Any] = {
    "max_num_seqs": 1,
    "async_scheduling": False,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 1024,
}
"""Of the engine that answers undisturbed: one sequence at a time, each prompt in one piece, nothing shared."""

MAX_GROWTH_BYTES = 64 * 2**20
"""By which the largest process of a kind may have grown since the first requests."""

MAX_NEW_FILES = 8
"""Descriptors that it may hold beyond those it held then."""

MODULES = {Target.CORE: CORE, Target.WORKER: WORKER, Target.HTTP: SIBLING}


@dataclass
class Trial:
    """What came of a run."""

    settings: Mapping[str, Any]
    options: argparse.Namespace
    seed: int
    judge: Judge
    monkey: Monkey
    faults: list[str] = field(default_factory=list)
    """What must not be, in words; empty: all is well."""
    before: dict[str, Footprint] = field(default_factory=dict)
    after: dict[str, Footprint] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def deeds(self) -> Counter[tuple[Target, Action]]:
        """How often what was done to what."""
        return Counter((deed.strike.target, deed.strike.action) for deed in self.monkey.deeds)

    def tell(self, replay: str) -> None:
        """Print the report as a table.

        Args:
            replay: the command for the same run.
        """
        counts = self.judge.counts
        rows: list[tuple[str, int | float | str]] = [("Requests", self.options.requests)]
        rows += [(what.capitalize(), count) for what, count in sorted(counts.items())]
        rows += [(f"{target.capitalize()} {action}", count) for (target, action), count in sorted(self.deeds.items())]
        rows += [("Requests under way at a strike, mean", self._mean_live())]
        for role, held in self.after.items():
            grown = (held.memory_bytes - self.before[role].memory_bytes) / 2**20 if role in self.before else 0.0
            rows.append((f"{role.capitalize()}: grown by (MiB)", grown))
        rows += [(f"{phase.capitalize()} (s)", seconds) for phase, seconds in self.seconds.items()]
        rows.append(("Faults", len(self.faults)))
        say_table("Chaos", rows)
        for fault in self.faults:
            say(f"fault: {fault}")
        if self.faults:
            say(f"again: {replay}")

    def write(self, path: str, replay: str) -> None:
        """Write everything to a file.

        Raises:
            CommandError: it cannot be written.
        """
        deeds = [
            {"target": deed.strike.target, "action": deed.strike.action, "time_s": deed.time_s, "live": deed.num_live}
            for deed in self.monkey.deeds
        ]
        document: dict[str, Any] = {
            **context(),
            "model_id": self.settings["model"],
            "settings": dict(self.settings),
            "seed": self.seed,
            "replay": replay,
            "requests": self.options.requests,
            "clients": self.options.clients,
            "counts": dict(self.judge.counts),
            "strikes": deeds,
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
            "findings": self.judge.findings,
        }
        write_json(path, document)

    def _mean_live(self) -> float:
        deeds = self.monkey.deeds
        return sum(deed.num_live for deed in deeds) / len(deeds) if deeds else 0.0


def try_engine(
    settings: Mapping[str, Any], options: argparse.Namespace, directory: Path, logs: Path, seed: int
) -> Trial:
    """Run all of it.

    Args:
        settings: of the engine, the model among them.
        options: of the run.
        directory: for everything that it makes, but for the
        logs: of servers and clients.
        seed: that requests, manners and strikes follow from.

    Raises:
        CommandError: an engine or a client did not start, or could not go on.
    """
    return asyncio.run(_try_engine(settings, options, directory, logs, seed))


async def _try_engine(
    settings: Mapping[str, Any], options: argparse.Namespace, directory: Path, logs: Path, seed: int
) -> Trial:
    distinct = options.distinct or max(1, options.requests // 4)
    requests = draw_requests(seed, min(distinct, options.requests))
    jobs = draw_jobs(seed, requests, options.requests)
    with (logs / "clients.log").open("wb") as errors:
        started = time.monotonic()
        expected, findings = await _answers_alone(settings, options, directory, logs, requests, errors)
        calm_s = time.monotonic() - started
        if findings:
            raise CommandError(f"a request cannot be answered even undisturbed: {findings[0]}")
        started = time.monotonic()
        trial = await _disturb(settings, options, directory, logs, seed, jobs, expected, errors)
    trial.seconds = {"undisturbed answers": calm_s, "storm": time.monotonic() - started}
    return trial


async def _answers_alone(
    settings: Mapping[str, Any],
    options: argparse.Namespace,
    directory: Path,
    logs: Path,
    requests: Sequence[Request],
    errors: BinaryIO,
) -> tuple[dict[int, Answer], list[str]]:
    """Return the answer to each request, by number, and what went wrong."""
    subject = Subject({**settings, **CALM_SETTINGS}, directory / "calm", logs / "calm.log")
    expected: dict[int, Answer] = {}
    faults: list[str] = []

    def take(job: Job, result: Result) -> bool:
        if result.fate is Fate.ANSWERED and result.answer is not None:
            expected[job.number] = result.answer
        else:
            faults.append(f"{result.detail or result.fate}: {job.request.body}")
        return False

    # As many callers as keep it busy: it serves one sequence at a time all the same.
    crew = None
    try:
        await subject.wait_until_ready()
        crew = Crew(subject.url, subject.address, 1, 8, options.timeout, errors)
        await crew.start()
        jobs = [Job(request.number, request) for request in requests]
        with _bar(len(jobs), "undisturbed", options) as bar:
            await _run_on(subject, Storm(crew, jobs, take, lambda job: None, 0, on_ended=bar.update))
        await crew.close()
        await subject.stop()
    finally:
        if crew:
            await crew.close()
        subject.kill()
    return expected, faults


async def _disturb(
    settings: Mapping[str, Any],
    options: argparse.Namespace,
    directory: Path,
    logs: Path,
    seed: int,
    jobs: Sequence[Job],
    expected: Mapping[int, Answer],
    errors: BinaryIO,
) -> Trial:
    """Ask all jobs of an engine whose processes are killed and stopped."""
    served = {**settings, "api_server_count": options.server_processes}
    subject = Subject(served, directory / "storm", logs / "server.log")
    crew = None
    try:
        await subject.wait_until_ready()
        crew = Crew(subject.url, subject.address, options.client_processes, options.clients, options.timeout, errors)
        trial = await _storm(settings, options, seed, subject, crew, jobs, expected)
        await crew.close()
        trial.faults += await subject.stop()
        trial.faults += [f"the log says: {line}" for line in subject.faults_in_log()]
    finally:
        if crew:
            await crew.close()
        subject.kill()
    return trial


async def _storm(
    settings: Mapping[str, Any],
    options: argparse.Namespace,
    seed: int,
    subject: Subject,
    crew: Crew,
    jobs: Sequence[Job],
    expected: Mapping[int, Answer],
) -> Trial:
    num_first = min(len(jobs) // 10 + 1, options.clients)
    targets = [Target.WORKER, Target.CORE, Target.APPLICATION]
    if options.server_processes > 1:
        targets.append(Target.HTTP)
    hang_s = 2.0 * max(settings["core_timeout"], settings["execute_model_timeout"]) + 2.0
    strikes: list[Strike] = plan_strikes(seed, len(jobs) - num_first, options.kills, targets, hang_s)

    def find(strike: Strike) -> list[Process]:
        if strike.target is Target.APPLICATION:
            return crew.applications
        # The first HTTP process is the parent of all: it may be stopped, but not killed.
        first = subject.processes(SERVER) if strike.target is Target.HTTP and strike.action is Action.STOP else []
        return [*first, *subject.processes(MODULES[strike.target])]

    monkey = Monkey(strikes, seed, find, lambda: crew.num_live)
    judge = Judge(expected, monkey.explains_break)
    trial = Trial(settings, options, seed, judge, monkey)
    await crew.start()
    with _bar(len(jobs), "disturbed", options) as bar:
        for part, disturber in ((jobs[:num_first], None), (jobs[num_first:], monkey)):
            take, take_death = judge.take, judge.take_death
            storm = Storm(crew, part, take, take_death, options.clients, disturber, on_ended=bar.update)
            await _run_on(subject, storm)
            if disturber is None:
                trial.faults += _not_calm(await subject.wait_until_calm(), "the first requests")
                trial.before = subject.footprints()
    trial.faults += _not_calm(await subject.wait_until_calm(), "the storm")
    trial.after = subject.footprints()
    trial.faults += [f"request {one['job']['number']}: {one['what']} {one['detail']}" for one in judge.findings]
    trial.faults += [f"no victim was found for a strike: {strike}" for strike in monkey.missed]
    trial.faults += _growth(trial)
    return trial


async def _run_on(subject: Subject, storm: Storm) -> None:
    """Run a storm, unless its server ends.

    Raises:
        CommandError: it did, or a client process cannot go on.
    """
    watching = asyncio.create_task(subject.wait_for_end(), name="server's end")
    watching.add_done_callback(lambda task: None if task.cancelled() else storm.fail(task.result()))
    try:
        await storm.run()
    finally:
        watching.cancel()


def _not_calm(trouble: str, after: str) -> list[str]:
    return [f"after {after} the engine does not come to rest: {trouble}"] if trouble else []


def _growth(trial: Trial) -> list[str]:
    faults = []
    for role, before in trial.before.items():
        after = trial.after.get(role)
        if after is None:
            faults.append(f"there is no {role} after the storm")
            continue
        if after.memory_bytes > before.memory_bytes + MAX_GROWTH_BYTES:
            faults.append(f"a {role} has grown from {before.memory_bytes >> 20} to {after.memory_bytes >> 20} MiB")
        if after.num_files > before.num_files + MAX_NEW_FILES:
            faults.append(f"a {role} holds {after.num_files} files after the storm, {before.num_files} before")
    return faults


def _bar(total: int, what: str, options: argparse.Namespace) -> "tqdm[Any]":
    return tqdm(total=total, desc=what, unit="request", disable=True if options.disable_tqdm else None)
