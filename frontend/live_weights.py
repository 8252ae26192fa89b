"""`LiveWeights`: pauses, sleep and weight updates of all engines of a client.

Several engines change together. None of them computes until all have the new weights, or the caller has been told which
engines did not change.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import uuid
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from octavo.frontend.engine_set import EngineSet
from octavo.frontend.weight_upload import Tensors, link_files, write_weights
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import ConflictError, InvalidRequestError, OctavoError, RequestFailedError
from octavo.protocol.events import EngineFacts
from octavo.protocol.weights import (
    WAKE_TAGS,
    GetWeights,
    HoldSteps,
    InFlightMode,
    InitWeightTransfer,
    PauseGeneration,
    PauseMode,
    ResumeGeneration,
    Sleep,
    Transfer,
    TransferGroup,
    UpdateWeights,
    WakeUp,
    WeightsCall,
    WeightsStatus,
)

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 3600.0
"""Timeout in seconds: an update reads a complete checkpoint, and a pause may wait for requests to finish."""

PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")
SCHEDULING = "scheduling"
"""vLLM's wake-up tag for `sleep(level=0)`: no memory has to come back."""
IN_FLIGHT_MODES: tuple[InFlightMode, ...] = ("recompute", "continue")

Weights: TypeAlias = "str | os.PathLike[str] | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Transfer"
"""A checkpoint on the engine's machine, named tensors of this process, or the tensors that rank 0 of a group
broadcasts."""


class LiveWeights:
    """Pauses and updates all engines of a client.

    Args:
        engines: engines of the client.
    """

    def __init__(self, engines: EngineSet) -> None:
        self._engines = engines
        self._changing = asyncio.Lock()

    async def status(self) -> dict[int, WeightsStatus]:
        """Return, by engine index, the version of the engine's weights and whether it is paused or asleep."""
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
        if level not in (0, 1, 2):
            raise InvalidRequestError(f"level must be 0, 1 or 2, got {level!r}", "level")
        await self._each(Sleep(level, mode) if level else PauseGeneration(mode, clear_cache=False))

    async def wake_up(self, tags: Iterable[str] | None) -> None:
        """See `AsyncClient.wake_up`."""
        chosen = list(WAKE_TAGS if tags is None else tags)
        for tag in chosen:
            _require_one_of("tags", tag, (*WAKE_TAGS, SCHEDULING))
        memory = [tag for tag in WAKE_TAGS if tag in chosen]
        only_resumes = SCHEDULING in chosen and not memory
        await self._each(ResumeGeneration() if only_resumes else WakeUp(memory))

    @property
    def world_size(self) -> int:
        """Number of workers of all engines together."""
        return sum(self._ranks().values())

    def _ranks(self) -> dict[int, int]:
        """Return the number of workers of each engine, by index."""
        facts = {index: self._engines[index].link.facts for index in self._indices}
        return {
            index: msgspec.msgpack.decode(one.config, type=ResolvedConfig).world_size for index, one in facts.items()
        }

    async def join(self, group: TransferGroup) -> None:
        """See `AsyncClient.init_weight_transfer_engine`."""
        if not 1 <= group.rank_offset <= group.world_size - self.world_size:
            raise InvalidRequestError(
                f"a group of {group.world_size} ranks has no room for {self.world_size} workers from rank "
                f"{group.rank_offset} on: rank 0 is the trainer",
                "world_size",
            )
        calls: dict[int, WeightsCall] = {}
        for index, num_ranks in self._ranks().items():
            calls[index] = InitWeightTransfer(group)
            group = msgspec.structs.replace(group, rank_offset=group.rank_offset + num_ranks)
        async with self._changing, self._held(calls):
            await self._each(calls)

    async def update(
        self, weights: Weights, *, label: str, is_partial: bool, in_flight: InFlightMode, is_kept: bool
    ) -> int:
        """See `AsyncClient.update_weights`."""
        _require_one_of("in_flight", in_flight, IN_FLIGHT_MODES)
        call = UpdateWeights(uuid.uuid4().hex, "", label, is_partial, in_flight, is_kept)
        async with self._changing, contextlib.AsyncExitStack() as cleanup:
            if isinstance(weights, Transfer):
                call = msgspec.structs.replace(call, is_kept=False, transfer=weights)
                return await self._update_all(dict.fromkeys(self._indices, call))
            if isinstance(weights, str | os.PathLike):
                call = msgspec.structs.replace(call, is_kept=True, path=str(Path.cwd() / weights))
                return await self._update_all(dict.fromkeys(self._indices, call))
            folders = self._upload_folders(call.update_id)
            cleanup.push_async_callback(asyncio.to_thread, _remove, folders.values())
            await asyncio.to_thread(_upload, weights, list(folders.values()))
            version = await self._update_all(
                {index: msgspec.structs.replace(call, path=str(folder)) for index, folder in folders.items()}
            )
            if is_kept:
                cleanup.pop_all()
            return version

    @property
    def _indices(self) -> list[int]:
        return [engine.index for engine in self._engines.all if not engine.link.failure]

    async def _update_all(self, calls: Mapping[int, UpdateWeights]) -> int:
        """Update all engines. If one refuses, none changes; none computes until all have changed."""
        async with self._held(calls):
            if len(calls) > 1:
                await self._each({index: msgspec.structs.replace(call, is_check=True) for index, call in calls.items()})
            after = await self._each(calls)
        return max(status.version for status in after.values())

    @contextlib.asynccontextmanager
    async def _held(self, indices: Collection[int]) -> AsyncIterator[None]:
        """Hold back the steps of several engines. A single engine does that itself."""
        held = indices if len(indices) > 1 else []
        try:
            await self._each(HoldSteps(), held)
            yield
        finally:
            with contextlib.suppress(OctavoError):
                await self._each(HoldSteps(is_held=False), held)

    async def _each(
        self, call: WeightsCall | Mapping[int, WeightsCall], indices: Iterable[int] | None = None
    ) -> dict[int, WeightsStatus]:
        """Make a call to engines, concurrently, and return their replies by index.

        Args:
            call: one call for all engines, or one per index.
            indices: indices of the engines. `None`: all that have not failed for good.

        Raises:
            OctavoError: the call failed in some engines; the message says in which it failed and succeeded. Its type is
            that of all failures, or RequestFailedError if they differ.
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
        if all(isinstance(one, UpdateWeights) and one.is_check for one in calls.values()):
            done = "; no engine has changed"
        kinds = {type(error) for error in failed.values()}
        kind = kinds.pop() if len(kinds) == 1 and kinds <= {InvalidRequestError, ConflictError} else RequestFailedError
        raise kind(f"{faults}{done}")

    def _upload_folders(self, name: str) -> dict[int, Path]:
        """Return, by engine index, the folder in shared memory where the engine reads uploaded weights."""
        return {index: _folder_of(self._engines[index].link.facts) / name for index in self._indices}


def _upload(weights: "Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]", folders: Sequence[Path]) -> None:
    """Write tensors to memory that the engines share with this process."""
    tensors: Tensors = weights.items() if isinstance(weights, Mapping) else weights
    write_weights(folders[0], tensors)
    for other in folders[1:]:
        link_files(folders[0], other)


def _folder_of(facts: EngineFacts) -> Path:
    folder = Path(facts.weights_dir or "/nonexistent")
    if not os.access(folder, os.W_OK):
        raise InvalidRequestError(
            "tensors can be sent to an engine on this machine only, through shared memory: give it the path of a "
            "checkpoint on its own machine",
            "weights",
        )
    return folder


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _require_one_of(name: str, value: Any, choices: Iterable[str]) -> None:
    if value not in choices:
        raise InvalidRequestError(f"{name} must be one of {', '.join(choices)}, got {value!r}", name)
