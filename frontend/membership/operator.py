"""`EngineOperator`: adds, drains, removes and replaces the engines of a server while it serves."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Iterator

from octavo.frontend.client import AsyncClient
from octavo.frontend.connected_engine import ConnectedEngine
from octavo.frontend.engine_configs import read_config
from octavo.frontend.engine_connection import EngineConnection
from octavo.frontend.engine_set import MAX_ENGINES
from octavo.frontend.engine_state import EngineState
from octavo.frontend.membership.directory import EngineDirectory
from octavo.frontend.membership.messages import AdminCommand, AdminResult, EngineEntry, EngineStatus
from octavo.frontend.membership.starter import EngineStarter
from octavo.frontend.recovery.replacement import require_changeable, require_same_number
from octavo.protocol.config import EngineConfig, ResolvedConfig
from octavo.protocol.errors import ConfigError, ConflictError, InvalidRequestError, OctavoError, StartupError
from octavo.protocol.identity import has_same_bits, weights_digest
from octavo.protocol.requests import GetStats
from octavo.protocol.stats import EngineStats

logger = logging.getLogger(__name__)

POLL_S = 0.05
"""Interval in seconds of checks whether requests have ended and other processes have followed."""

STATS_TIMEOUT_S = 2.0
"""Seconds that an engine gets to report its number of requests for a list."""

APPLICATIONS_TIMEOUT_S = 60.0
"""Seconds to wait for applications that joined an engine by its address; they do not know that it drains."""

JOIN_TIMEOUT_S = 60.0
"""Seconds that the other processes get to join an engine that is up."""

_STATUS: tuple[tuple[type[Exception], int], ...] = ((InvalidRequestError, 400), (ConflictError, 409), (Exception, 500))


class EngineOperator:
    """Carries out commands, one change of the engines at a time.

    Args:
        client: client of this process, which has started or joined the engines.
        read: reads the engines' configuration again. `None`: this server starts no engines.
        join: joins a running engine.
    """

    def __init__(
        self,
        client: AsyncClient,
        read: Callable[[], EngineConfig] | None,
        join: Callable[[EngineEntry], Awaitable[EngineConnection]],
    ) -> None:
        self.directory = EngineDirectory(self.execute, self._entries)
        self._client = client
        self._engines = client.engine_set
        self._starter = EngineStarter(client, read, join)
        self._leaving: set[int] = set()
        """Indices of engines whose requests move to others."""
        self._hidden: set[int] = set()
        """Indices of engines that the other processes must leave."""
        self._model: str | None = None
        """Model with which an operator has replaced the configured one. `None`: not replaced."""
        self._key_files: dict[int, str | None] = {}
        self._change = ""
        """Description of the change that is in progress; empty: none."""
        self._tasks: set[asyncio.Task[AdminResult]] = set()

    async def execute(self, command: AdminCommand) -> AdminResult:
        """Carry out a command to its end, even if the caller is cancelled; return the engines afterwards."""
        task = asyncio.create_task(self._execute(command), name=f"engines: {command.action}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Cancel the change in progress: an engine that starts is stopped. The owner of the client closes it."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.directory.close()

    async def restart(self, config: EngineConfig) -> None:
        """Replace the engines with engines of another configuration.

        New engines that compute the same bits take over live requests; otherwise the old engines finish them.

        Raises:
            StartupError: an engine cannot start; the others continue.
            ConflictError: another change is in progress.
        """
        with self._changing("a restart"):
            resolved = await asyncio.to_thread(read_config, config)
            weights = await asyncio.to_thread(weights_digest, resolved.model)
            if weights == self._client.facts.weights_digest and has_same_bits(resolved, self._client.config):
                await self._client.restart(config)
            else:
                await self._starter.require_same_tokens(resolved)
                await self._replace(resolved)
            self._model = None

    async def _execute(self, command: AdminCommand) -> AdminResult:
        try:
            await self._carry_out(command)
        except (OctavoError, OSError) as error:
            status = next(status for kind, status in _STATUS if isinstance(error, kind))
            hint = getattr(error, "hint", "")
            message = f"{error} ({hint})" if hint else str(error)
            logger.error("octavo admin engines %s: %s", command.action, message)
            return AdminResult(status, message)
        return AdminResult(engines=await self.statuses())

    async def _carry_out(self, command: AdminCommand) -> None:
        require_changeable(self._client.config, command.action)
        match command.action:
            case "list":
                pass
            case "add":
                with self._changing("an engine is added"):
                    await self._add(command)
            case "drain":
                await self._drain(self._index(command), command.timeout_s)
            case "resume":
                with self._changing("an engine resumes"):
                    self._resume(self._index(command))
            case "remove":
                index = self._index(command)
                await self._drain(index, command.timeout_s)
                with self._changing("an engine is removed"):
                    await self._remove(index)
            case "replace":
                with self._changing("the engines are replaced"):
                    await self._replace(await self._starter.configuration(command.model))
                    self._model = command.model

    async def statuses(self) -> list[EngineStatus]:
        """Return the engines for operators, with their current numbers of requests."""
        starting = [
            EngineStatus(index, "starting", address=address) for index, address in self._starter.starting.items()
        ]
        known = await asyncio.gather(*(self._status(engine) for engine in self._engines.all))
        return sorted([*starting, *known], key=lambda status: status.index)

    async def _status(self, engine: ConnectedEngine) -> EngineStatus:
        facts, report, stats = engine.link.facts, engine.report(), engine.link.latest_stats
        if engine.link.is_up:
            with contextlib.suppress(OctavoError):  # it died, or is busy: the latest numbers are a second old
                latest = await engine.link.call(GetStats(), timeout_s=STATS_TIMEOUT_S)
                stats = latest if isinstance(latest, EngineStats) else stats
        return EngineStatus(
            *(engine.index, report.state, report.reason, engine.link.address, facts.model, facts.weights_digest),
            *(engine.process is not None, stats.num_running, stats.num_waiting),
        )

    async def _add(self, command: AdminCommand) -> None:
        index = self._free_index()
        if command.address is not None:
            if any(engine.link.address == command.address for engine in self._engines.all):
                raise ConflictError(f"the engine at {command.address} is one of them already")
            self._key_files[index] = command.public_key_file
            connection = await self._starter.join(index, command.address, command.public_key_file)
        else:
            places = set(range(MAX_ENGINES)) - {one.config.engine_place for one in self._engines.all if one.process}
            connection = await self._starter.start(index, min(places), await self._starter.configuration(self._model))
        await self._introduce(index, connection, must_be_equal=True)
        self._set_states({index: EngineState.SERVING})
        logger.info("engine %d at %s has joined", index, connection.link.address)

    async def _replace(self, config: ResolvedConfig) -> None:
        """Start a successor for each of our engines, one after another; an engine drains once its successor is up.

        New requests go to the new engines once there are at least as many of them as of the old ones. If a successor
        cannot start, engines that were already replaced stay replaced.
        """
        require_same_number(self._client.config, config)
        old = [engine.index for engine in self._engines.all if engine.state is EngineState.SERVING]
        for index in old:
            if (process := self._engines[index].process) is None:
                raise ConflictError("this server has joined an engine of another process: replace it there")
            process.require_replaceable(config)
        started: list[int] = []
        try:
            for index in old:
                started.append(await self._start_successor(index, config))
                await self._exchange(index, started, old)
        except (OctavoError, OSError) as error:
            idle = [index for index in started if self._engines[index].state is EngineState.STARTING]
            for index in idle:
                await self._remove(index)
            if started:
                gone = [index for index in old if index not in self._engines]
                new = sorted(set(started) - set(idle))
                message = f"{error}; engines {gone} are removed and {new} are new"
                raise StartupError(message, hint=getattr(error, "hint", "")) from error
            raise

    async def _start_successor(self, index: int, config: ResolvedConfig) -> int:
        """Start the successor of an engine, on the same GPUs and cores; return its index."""
        successor = self._free_index()
        place = self._engines[index].config.engine_place
        await self._introduce(successor, await self._starter.start(successor, place, config), must_be_equal=False)
        return successor

    async def _exchange(self, index: int, started: list[int], old: list[int]) -> None:
        """Drain and remove an engine whose successor, the last of `started`, is up."""
        successor, remaining = started[-1], old[old.index(index) :]
        is_equal = self._engines[successor].link.facts.identity == self._engines.link.identity
        if is_equal or len(started) >= len(remaining):
            states = dict.fromkeys(started, EngineState.SERVING)
            draining = [index] if is_equal else remaining
            self._set_states(states | dict.fromkeys(draining, EngineState.DRAINING))
        else:
            self._set_states({index: EngineState.DRAINING})
        await self._hand_over_addresses(index, successor)
        logger.info("engine %d replaces engine %d, which finishes its requests", successor, index)
        await self._until_idle(index, None)
        await self._remove(index)

    async def _drain(self, index: int, timeout_s: float | None) -> None:
        """Let an engine finish its requests; after the timeout they move to engines that compute the same bits.

        Raises:
            ConflictError: it is the last serving engine, or it was resumed meanwhile.
        """
        with self._changing("an engine drains"):
            engine = self._engines[index]
            if engine.state is EngineState.SERVING:
                others = [one for one in self._engines.all if one.state is EngineState.SERVING and one is not engine]
                if not any(one.link.is_up for one in others):
                    raise ConflictError(f"engine {index} is the last one that serves: add another one first")
                self._set_states({index: EngineState.DRAINING})
                logger.info("engine %d drains", index)
        await self._until_idle(index, timeout_s)

    def _resume(self, index: int) -> None:
        engine = self._engines[index]
        if engine.link.facts.identity != self._engines.link.identity:
            raise ConflictError(f"engine {index} has other weights or settings than those that serve")
        self._leaving.discard(index)
        self._set_states({index: EngineState.SERVING})
        logger.info("engine %d serves again", index)

    async def _remove(self, index: int) -> None:
        """Disconnect every process from an idle engine, and stop it if we started it."""
        if index not in self._engines or self._engines[index].state is EngineState.SERVING:
            raise ConflictError(f"engine {index} does not drain any more")
        heirs = [one.index for one in self._engines.all if one.state is EngineState.SERVING and one.process]
        process = self._engines[index].process
        if heirs and process and not process.has_heir:
            await self._hand_over_addresses(index, heirs[0])
        self._hidden.add(index)
        version = self.directory.publish()
        await self._followed(lambda report: report.version >= version and index not in report.joined)
        while not self._engines.is_idle(index):  # noqa: ASYNC110  (it got requests of an engine that died meanwhile)
            await asyncio.sleep(POLL_S)
        await self._forget(index)
        logger.info("engine %d is removed", index)

    async def _introduce(self, index: int, connection: EngineConnection, *, must_be_equal: bool) -> None:
        """Add an engine, and have all processes join it.

        Raises:
            ConfigError: `must_be_equal`, and it computes other bits than the serving engines.
        """
        try:
            if must_be_equal and connection.link.facts.identity != self._engines.link.identity:
                raise ConfigError(
                    f"the engine at {connection.link.address} serves {connection.link.facts.model} with other weights "
                    "or settings, or on another kind of processor",
                    hint="octavo admin engines replace exchanges the weights of all engines",
                )
            self._engines.add(index, connection)
        except BaseException:
            await connection.close()
            raise
        try:
            self.directory.publish()
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                await self._followed(lambda report: index in report.joined)
        except BaseException as error:
            self._hidden.add(index)
            self.directory.publish()
            await self._forget(index)
            if isinstance(error, TimeoutError):
                message = f"an HTTP process has not joined engine {index} within {JOIN_TIMEOUT_S:.0f} s"
                raise StartupError(message) from None
            raise

    async def _forget(self, index: int) -> None:
        await self._engines.remove(index)
        self._leaving.discard(index)
        self._hidden.discard(index)
        self._key_files.pop(index, None)

    async def _until_idle(self, index: int, timeout_s: float | None) -> None:
        """Wait until no process needs a draining engine; after the timeout its requests move if they can.

        Raises:
            ConflictError: it serves again.
        """
        version = self.directory.publish()
        loop = asyncio.get_running_loop()
        start_s, idle_since_s = loop.time(), math.inf
        while True:
            if self._is_idle(index, version):
                idle_since_s = min(idle_since_s, loop.time())
                if loop.time() - idle_since_s >= APPLICATIONS_TIMEOUT_S or not await self._serves_applications(index):
                    return
            elif timeout_s is not None and loop.time() - start_s >= timeout_s and index not in self._leaving:
                logger.info("engine %d is not idle after %g s: moving its requests", index, timeout_s)
                self._leaving.add(index)
                self._engines.move_requests([index])
                self.directory.publish()
            await asyncio.sleep(POLL_S)
            if index not in self._engines or self._engines[index].state is EngineState.SERVING:
                raise ConflictError(f"engine {index} does not drain any more")

    def _is_idle(self, index: int, version: int) -> bool:
        """Return whether no HTTP process needs an engine any more."""
        is_needed = any(report.version < version or index in report.busy for report in self.directory.reports)
        return self._engines.is_idle(index) and not is_needed

    async def _serves_applications(self, index: int) -> bool:
        """Return whether one of our engines has requests of applications that joined it by its address."""
        engine = self._engines[index]
        if engine.process is None or not engine.link.is_up:
            return False
        try:
            stats = await engine.link.call(GetStats())
        except OctavoError:  # the engine has just died
            return True
        return not isinstance(stats, EngineStats) or stats.num_running + stats.num_waiting > 0

    async def _followed(self, has_followed: Callable[..., bool]) -> None:
        """Wait until every process has followed. A process that ends does not count, but its successor does."""
        while not all(has_followed(report) for report in self.directory.reports):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)

    async def _hand_over_addresses(self, index: int, heir: int) -> None:
        """Let applications that joined an engine find another one at its address when its core is gone."""
        old, new = self._engines[index], self._engines[heir]
        if old.process and new.process:
            # A restarting core listens at the address that it was given.
            while not old.process.is_running and not old.link.failure:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            old.pin_engine()
            old.process.hand_over_addresses(new.process)
            old.link.address = old.process.address  # if its core crashes, the next one listens there
            self.directory.publish()

    def _set_states(self, states: dict[int, EngineState]) -> None:
        self._engines.set_states(states)
        self.directory.publish()

    def _entries(self) -> list[EngineEntry]:
        """Return the engines for the other processes."""
        return [
            EngineEntry(
                engine.index,
                engine.link.address,
                engine.state,
                engine.index in self._leaving,
                engine.link.failure is not None,
                self._key_files.get(engine.index),
                engine.process is not None,
            )
            for engine in self._engines.all
            if engine.index not in self._hidden
        ]

    def _free_index(self) -> int:
        free = set(range(MAX_ENGINES)) - {engine.index for engine in self._engines.all} - set(self._starter.starting)
        if not free:
            raise ConflictError(f"there are {MAX_ENGINES} engines already")
        return min(free)

    def _index(self, command: AdminCommand) -> int:
        if command.index is None or command.index not in self._engines:
            known = ", ".join(str(engine.index) for engine in self._engines.all)
            raise InvalidRequestError(f"there is no engine {command.index}: use one of {known}", "index")
        return command.index

    @contextlib.contextmanager
    def _changing(self, what: str) -> Iterator[None]:
        """Exclude other changes of the engines.

        Raises:
            ConflictError: a change is in progress.
        """
        if self._change:
            raise ConflictError(f"{self._change} at the moment: try again later")
        self._change = what
        try:
            yield
        finally:
            self._change = ""
