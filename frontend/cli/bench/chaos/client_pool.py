"""`ClientPool`: the client processes of a run.

Distributes jobs, and replaces processes that were killed. Checks no answers.
"""

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

import msgspec

from octavo.frontend.cli.bench.chaos.client import MAX_LINE_BYTES
from octavo.frontend.cli.bench.chaos.jobs import ChaosJob, EngineLocation, Result
from octavo.frontend.cli.bench.chaos.processes import Process, process_of
from octavo.frontend.cli.errors import CommandError

MODULE = "octavo.frontend.cli.bench.chaos.client"

READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0


@dataclass(eq=False)
class ClientProcess:
    """One client process."""

    address: str
    """Addresses of the engines that it has joined, separated by commas; "" if it uses HTTP."""
    process: asyncio.subprocess.Process
    live: dict[int, ChaosJob] = field(default_factory=dict)
    """Jobs that were sent to this process and have no result yet."""

    @property
    def is_http(self) -> bool:
        """Whether it sends HTTP requests; otherwise it is an application that has joined engines."""
        return not self.address

    def send(self, job: ChaosJob) -> None:
        """Send a job to the process."""
        assert self.process.stdin is not None
        self.live[job.number] = job
        self.process.stdin.write(msgspec.json.encode(job) + b"\n")


class ClientPool:
    """Client processes of both kinds.

    Args:
        url: the URL of the HTTP server.
        addresses: the addresses of the engines. Every second application joins one of them, the others join all.
        num_each: number of processes of each kind.
        num_callers: maximum number of concurrent requests, over all processes.
        timeout_s: timeout in seconds for one request.
        errors: receives the standard error of all processes.
    """

    def __init__(
        self, url: str, addresses: Sequence[str], num_each: int, num_callers: int, timeout_s: float, errors: BinaryIO
    ) -> None:
        self._url = url
        self._addresses = addresses
        self._num_each = num_each
        self._num_callers = max(1, num_callers // (2 * num_each))
        """Maximum number of concurrent requests of each process."""
        self._timeout_s = timeout_s
        self._errors = errors
        self._processes: list[ClientProcess] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: dict[bool, deque[ChaosJob]] = {True: deque(), False: deque()}
        self._is_closing = False
        self.on_result: Callable[[ChaosJob, Result], None] = lambda job, result: None
        self.on_death: Callable[[ChaosJob], None] = lambda job: None
        """Called for each job that was in flight in a killed process."""
        self.on_failure: Callable[[CommandError], None] = lambda error: None

    @property
    def applications(self) -> list[Process]:
        """The running processes that have joined the engine."""
        found = [process_of(client.process.pid) for client in self._processes if not client.is_http]
        return [process for process in found if process is not None and process.is_running]

    @property
    def num_live(self) -> int:
        """Number of in-flight requests."""
        return sum(len(client.live) for client in self._processes)

    async def start(self) -> None:
        """Start all processes and wait until they are ready.

        Raises:
            CommandError: a process did not become ready.
        """
        locations = [location for number in range(self._num_each) for location in ("", self._joined_by(number))]
        self._processes = list(await asyncio.gather(*map(self._spawn, locations)))
        self._tasks = [asyncio.create_task(self._follow(index)) for index in range(len(self._processes))]

    def add(self, jobs: Iterable[ChaosJob]) -> None:
        """Queue jobs and send as many as the limits allow."""
        for job in jobs:
            self._waiting[job.request.is_http].append(job)
        for client in self._processes:
            self._feed(client)

    async def close(self) -> None:
        """Stop all processes. Idempotent."""
        self._is_closing = True
        for client in self._processes:
            assert client.process.stdin is not None
            client.process.stdin.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_TIMEOUT_S)
        for client in self._processes:
            if client.process.returncode is None:
                client.process.kill()
            await client.process.wait()
        for task in self._tasks:
            task.cancel()

    def _joined_by(self, number: int) -> str:
        """Return the addresses of the engines that an application joins."""
        if number % 2 == 0:
            return ",".join(self._addresses)
        return self._addresses[number // 2 % len(self._addresses)]

    async def _spawn(self, address: str) -> ClientProcess:
        """Start a process and wait until it is ready.

        Args:
            address: the addresses of the engines that it joins; "" to use HTTP.

        Raises:
            CommandError: the process did not become ready.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", MODULE),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._errors,
            limit=MAX_LINE_BYTES,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        location = EngineLocation("" if address else self._url, address, self._timeout_s)
        process.stdin.write(msgspec.json.encode(location) + b"\n")
        try:
            line = await asyncio.wait_for(process.stdout.readline(), READY_TIMEOUT_S)
            if not line:
                raise CommandError("a client process did not start", "see clients.log")
        except BaseException as error:
            process.kill()
            await process.wait()
            if isinstance(error, TimeoutError):
                raise CommandError("a client process was not ready in time", "see clients.log") from None
            raise
        return ClientProcess(address, process)

    async def _follow(self, index: int) -> None:
        """Read a process's results until the pool closes. Replace the process if it is killed."""
        while not self._is_closing:
            client = self._processes[index]
            self._feed(client)
            assert client.process.stdout is not None
            while line := await client.process.stdout.readline():
                if not line.endswith(b"\n"):
                    break  # killed while writing a line
                result = msgspec.json.decode(line, type=Result)
                self.on_result(client.live.pop(result.number), result)
                self._feed(client)
            code = await client.process.wait()
            lost, client.live = client.live, {}
            if self._is_closing:
                return
            if code >= 0:
                self.on_failure(CommandError(f"a client process exited with code {code}", "see clients.log"))
                return
            for job in lost.values():
                self.on_death(job)
            try:
                self._processes[index] = await self._spawn(client.address)
            except CommandError as error:
                self.on_failure(error)
                return

    def _feed(self, client: ClientProcess) -> None:
        waiting = self._waiting[client.is_http]
        while waiting and len(client.live) < self._num_callers and client.process.returncode is None:
            client.send(waiting.popleft())
