"""`LiveWeights`: pauses, sleep and updates of the weights of all engines of a client.

Several engines change together: none of them computes until all have the new weights, or the caller knows which do not.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from octavo.frontend.engine_set import EngineSet
from octavo.frontend.weight_upload import Tensors, links_of, write_weights
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import InvalidRequestError, OctavoError, RequestFailedError
from octavo.protocol.events import EngineFacts
from octavo.protocol.weights import (
    WAKE_TAGS,
    GetWeights,
    InFlightMode,
    InitWeightTransfer,
    PauseGeneration,
    PauseMode,
    ResumeGeneration,
    Sleep,
    Transfer,
    TransferGroup,
    UpdateWeights,
    WakeTag,
    WakeUp,
    WeightsCall,
    WeightsStatus,
)

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 3600.0
"""An update reads a whole checkpoint, and a pause may wait for requests to finish."""

PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")
IN_FLIGHT_MODES: tuple[InFlightMode, ...] = ("recompute", "continue")

Weights: TypeAlias = "str | os.PathLike[str] | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Transfer"
"""A checkpoint on the engine's machine, named tensors of this process, or those that rank 0 of a group broadcasts."""


class LiveWeights:
    """The weights of all engines of a client.

    Args:
        engines: of the client.
    """

    def __init__(self, engines: EngineSet) -> None:
        self._engines = engines
        self._changing = asyncio.Lock()

    async def status(self) -> dict[int, WeightsStatus]:
        """Return the state of each engine, by index."""
        return await self._each(GetWeights())

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """See `AsyncClient.pause_generation`."""
        _require_one_of("mode", mode, PAUSE_MODES)
        await self._each(PauseGeneration(mode, clear_cache))

    async def resume(self) -> None:
        """See `AsyncClient.resume_generation`."""
        await self._each(ResumeGeneration())

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """See `AsyncClient.sleep`."""
        _require_one_of("mode", mode, PAUSE_MODES)
        if level not in (1, 2):
            raise InvalidRequestError(f"level must be 1 or 2, got {level!r}", "level")
        await self._each(Sleep(level, mode))

    async def wake_up(self, tags: Iterable[WakeTag] | None) -> None:
        """See `AsyncClient.wake_up`."""
        chosen = list(WAKE_TAGS if tags is None else tags)
        for tag in chosen:
            _require_one_of("tags", tag, WAKE_TAGS)
        await self._each(WakeUp(chosen))

    @property
    def world_size(self) -> int:
        """The number of workers of all engines."""
        facts = [self._engines[index].link.facts for index in self._indices]
        return sum(msgspec.msgpack.decode(one.config, type=ResolvedConfig).world_size for one in facts)

    async def join(self, group: TransferGroup) -> None:
        """See `AsyncClient.init_weight_transfer_engine`."""
        if len(self._indices) != 1:
            raise InvalidRequestError(
                f"a trainer broadcasts to one engine, and there are {len(self._indices)}: update them from a "
                "checkpoint, or start an engine without --data-parallel-size",
                "weights",
            )
        if not 1 <= group.rank_offset <= group.world_size - self.world_size:
            raise InvalidRequestError(
                f"a group of {group.world_size} ranks has no room for {self.world_size} workers from rank "
                f"{group.rank_offset} on: rank 0 is the trainer",
                "world_size",
            )
        async with self._changing:
            await self._each(InitWeightTransfer(group))

    async def update(
        self, weights: Weights, *, label: str, is_partial: bool, in_flight: InFlightMode, is_kept: bool
    ) -> int:
        """See `AsyncClient.update_weights`."""
        _require_one_of("in_flight", in_flight, IN_FLIGHT_MODES)
        async with self._changing:
            update_id = uuid.uuid4().hex
            if isinstance(weights, Transfer):
                paths = dict.fromkeys(self._indices, "")
                return await self._update_all(
                    paths, update_id, label, is_partial, in_flight, is_kept=False, transfer=weights
                )
            if isinstance(weights, str | os.PathLike):
                paths = dict.fromkeys(self._indices, str(Path.cwd() / weights))
                return await self._update_all(paths, update_id, label, is_partial, in_flight, is_kept=True)
            paths = await self._upload(weights, update_id)
            try:
                version = await self._update_all(paths, update_id, label, is_partial, in_flight, is_kept=is_kept)
            except BaseException:
                await asyncio.to_thread(_remove, paths)
                raise
            if not is_kept:
                await asyncio.to_thread(_remove, paths)
            return version

    @property
    def _indices(self) -> list[int]:
        return [engine.index for engine in self._engines.all if not engine.link.failure]

    async def _update_all(
        self,
        paths: Mapping[int, str],
        update_id: str,
        label: str,
        is_partial: bool,
        in_flight: InFlightMode,
        *,
        is_kept: bool,
        transfer: Transfer | None = None,
    ) -> int:
        """Update all engines; none of several computes meanwhile."""
        paused: list[int] = []
        if len(paths) > 1:
            before = await self.status()
            paused = [index for index, status in before.items() if not status.is_paused]
        try:
            await self._each(PauseGeneration("keep", clear_cache=False), paused)
            calls = {
                index: UpdateWeights(update_id, path, label, is_partial, in_flight, is_kept, transfer)
                for index, path in paths.items()
            }
            after = await self._each(calls)
        finally:
            with contextlib.suppress(OctavoError):
                await self._each(ResumeGeneration(), paused)
        return max(status.version for status in after.values())

    async def _each(
        self, call: WeightsCall | Mapping[int, WeightsCall], indices: Iterable[int] | None = None
    ) -> dict[int, WeightsStatus]:
        """Make a call to engines, all at once, and return their answers.

        Args:
            call: for all, or for each.
            indices: of the engines; None: all that have not failed for good.

        Raises:
            RequestFailedError: it failed in some; the message says in which, and in which not.
        """
        calls = (
            call if isinstance(call, Mapping) else dict.fromkeys(self._indices if indices is None else indices, call)
        )
        answers = await asyncio.gather(
            *(self._engines[index].link.call(one, CALL_TIMEOUT_S) for index, one in calls.items()),
            return_exceptions=True,
        )
        found: dict[int, WeightsStatus] = {}
        failed: dict[int, BaseException] = {}
        for index, answer in zip(calls, answers, strict=True):
            if isinstance(answer, BaseException):
                failed[index] = answer
            else:
                assert isinstance(answer, WeightsStatus), "the answer to a call about weights"
                found[index] = answer
        if not failed:
            return found
        if len(calls) == 1 or not all(isinstance(error, OctavoError) for error in failed.values()):
            raise next(iter(failed.values()))
        faults = "; ".join(f"engine {index}: {error}" for index, error in failed.items())
        done = f"; done in engine {', '.join(map(str, found))}" if found else ""
        raise RequestFailedError(f"{faults}{done}")

    async def _upload(
        self, weights: "Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]", name: str
    ) -> dict[int, str]:
        """Write tensors to memory that engines share with this process; return the path for each engine."""
        facts = {index: self._engines[index].link.facts for index in self._indices}
        folders = {index: _folder_of(one) / name for index, one in facts.items()}
        tensors: Tensors = weights.items() if isinstance(weights, Mapping) else weights
        (first, *others) = folders.values()
        try:
            await asyncio.to_thread(write_weights, first, tensors)
            for other in others:
                await asyncio.to_thread(links_of, first, other)
        except BaseException:
            await asyncio.to_thread(_remove, {index: str(folder) for index, folder in folders.items()})
            raise
        return {index: str(folder) for index, folder in folders.items()}


def _folder_of(facts: EngineFacts) -> Path:
    folder = Path(facts.weights_dir or "/nonexistent")
    if not os.access(folder, os.W_OK):
        raise InvalidRequestError(
            "tensors can be sent to an engine on this machine only, through shared memory: give it the path of a "
            "checkpoint on its own machine",
            "weights",
        )
    return folder


def _remove(paths: Mapping[int, str]) -> None:
    for path in paths.values():
        shutil.rmtree(path, ignore_errors=True)


def _require_one_of(name: str, value: Any, choices: Iterable[str]) -> None:
    if value not in choices:
        raise InvalidRequestError(f"{name} must be one of {', '.join(choices)}, got {value!r}", name)
