"""`ChildProcesses`: processes that decode untrusted files and may be killed. Independent of the kind of file."""

import asyncio
import contextlib
import sys
from typing import TypeVar

import msgspec

from octavo.frontend.media.download import MediaError
from octavo.frontend.media.wire import LENGTH, Ready
from octavo.protocol.env import child_environment
from octavo.protocol.errors import ConfigError

MAX_PROCESSES = 2
"""More than one process, so that a slow file does not hold up the others."""
START_TIME_S = 120.0
"""Seconds that importing `transformers` may take on a busy machine."""

Answer = TypeVar("Answer", bound=msgspec.Struct)


class ChildProcesses:
    """Up to `MAX_PROCESSES` processes of one kind, started on demand. Belongs to one event loop.

    Args:
        module: Python module that a process runs.
        setup: the first message to a process, which replies with `Ready`.
        timeout_s: seconds that a job may take; then the process is killed.
        hint: tells the operator what to do if a process cannot load its libraries or files.
    """

    def __init__(self, module: str, setup: msgspec.Struct, timeout_s: float, hint: str) -> None:
        self._module, self._setup, self._timeout_s, self._hint = module, msgspec.msgpack.encode(setup), timeout_s, hint
        self._gate = asyncio.Semaphore(MAX_PROCESSES)
        self._idle: list[asyncio.subprocess.Process] = []
        self._ready: Ready | None = None

    async def ready(self) -> Ready:
        """Return what a process reports once it has loaded.

        Raises:
            ConfigError: the process cannot load what it needs.
        """
        if self._ready is None:
            async with self._gate:
                self._idle.append(await self._take())
        assert self._ready is not None, "a process is there"
        return self._ready

    async def ask(self, job: bytes, kind: type[Answer]) -> Answer:
        """Run a job in a process and return the reply.

        Raises:
            MediaError: the job takes too long, or the process dies.
            ConfigError: a process cannot load what it needs.
        """
        async with self._gate:
            process = await self._take()
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await _ask(process, job, kind)
            except BaseException as error:
                await _kill(process)
                if isinstance(error, TimeoutError):
                    raise MediaError("it takes too long to decode (--media-decode-timeout)") from None
                if isinstance(error, asyncio.IncompleteReadError | ConnectionError | msgspec.DecodeError):
                    raise MediaError("the process that decoded it has died") from None
                raise
            self._idle.append(process)
        return answer

    async def close(self) -> None:
        """Stop the processes."""
        while self._idle:
            await _kill(self._idle.pop())

    async def _take(self) -> asyncio.subprocess.Process:
        """Return an idle process, starting one if necessary."""
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", self._module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            # Threads of numpy's matrix products would spin on cores that the engine computes on.
            env=child_environment({"OPENBLAS_NUM_THREADS": "1"}),
        )
        try:
            async with asyncio.timeout(START_TIME_S):
                ready = await _ask(process, self._setup, Ready)
        except BaseException as error:
            await _kill(process)
            if isinstance(error, TimeoutError | asyncio.IncompleteReadError | ConnectionError):
                raise ConfigError(f"the process that decodes media does not start: {type(error).__name__}") from error
            raise
        if ready.fault:
            await _kill(process)
            raise ConfigError(f"what decodes and processes media cannot be loaded: {ready.fault}", hint=self._hint)
        self._ready = ready
        return process


async def _ask(process: asyncio.subprocess.Process, message: bytes, kind: type[Answer]) -> Answer:
    assert process.stdin is not None and process.stdout is not None, "pipes"
    process.stdin.write(LENGTH.pack(len(message)))
    process.stdin.write(message)
    await process.stdin.drain()
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=kind)


async def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
