"""The worker's life after its imports: load, measure, then obey the core's commands one by one.

Computes nothing itself: a step is `step.execute`, the model is `models`, sampling is `sampling`.
"""

import gc
import logging
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import assert_never

import torch
import zmq

from octavo.protocol.channel import ResultPush, Subscriber
from octavo.protocol.control import WorkerReady, WorkerSpec
from octavo.protocol.env import Env
from octavo.protocol.errors import NotEnoughMemoryError, ProtocolError, StartupError
from octavo.protocol.lifecycle import EXIT_OK, Reporter, StopSignal
from octavo.protocol.steps import (
    Acknowledged,
    AllocateCache,
    CacheReady,
    CommandFailed,
    Profile,
    SlotMask,
    StepPlan,
    StepResult,
    Stop,
    TokenMasks,
    WorkerCommand,
    WorkerReply,
)
from octavo.worker_proc.device import open_device
from octavo.worker_proc.device.base import Device
from octavo.worker_proc.facts import measure
from octavo.worker_proc.kernels import open_kernels
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.step.open import open_steps
from octavo.worker_proc.step.steps import Steps
from octavo.worker_proc.step.trace import StepTrace
from octavo.worker_proc.weights.load import load_model

logger = logging.getLogger(__name__)

ABORT_SIGNALS = 2
"""SIGTERMs that end a worker. One may have been sent to the whole process group: the core drains first."""


class Worker:
    """One rank: a model, its cache once the core has said how large, and a batch."""

    def __init__(self, spec: WorkerSpec, model: Model, device: Device) -> None:
        self._spec = spec
        self._model = model
        self._device = device
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._subscriber = Subscriber(self._context, spec.plan_address)
        self._results = ResultPush(self._context, spec.result_address)
        self._steps: Steps | None = None
        self._sequence = 0
        """Of the latest command."""
        self._kept: deque[WorkerCommand] = deque()
        """Commands that came while a step waited for its masks."""
        self._stop: StopSignal | None = None
        self._poller = zmq.Poller()
        self._poller.register(self._subscriber.socket, zmq.POLLIN)
        self._trace = StepTrace(spec.rank)

    @classmethod
    def start(cls, spec: WorkerSpec, reporter: Reporter) -> "Worker":
        """Load the model, measure the device unless its facts are known, join the core's broadcast and report ready.

        Raises:
            StartupError: with the root cause.
        """
        config = spec.config
        env = Env.read()
        with reporter.phase("opening the device"):
            device = open_device(config, rank=spec.rank)
        free_bytes = device.free_bytes()
        library = open_kernels(config, env, reporter.phase) if config.device == "cpu" else None
        with reporter.phase("loading weights"):
            model = load_model(
                config, reporter.progress, device=device.torch_device, library=library, cache_dir=env.cache_dir
            )
        if (facts := spec.facts) is None:
            with reporter.phase("profiling memory"):
                facts = measure(model, device, config, rank=spec.rank, free_bytes=free_bytes)
        gc.freeze()
        gc.enable()
        worker = cls(spec, model, device)
        reporter.mark_ready(WorkerReady(facts))
        return worker

    def run(self, stop: StopSignal) -> int:
        """Obey commands until `Stop` or the second SIGTERM; returns the exit code.

        Blocks until: then. Waiting for a command costs no processor time.
        """
        self._stop = stop
        self._poller.register(stop.fileno(), zmq.POLLIN)
        while stop.count < ABORT_SIGNALS:
            self._deliver_results()
            command = self._kept.popleft() if self._kept else self._subscriber.receive(timeout_s=0)
            if command is None:
                self._rest()
                stop.acknowledge()
            elif isinstance(command, Stop):
                break
            else:
                self._obey(command)
        self._trace.stop()
        self._close()
        return EXIT_OK

    def _rest(self) -> None:
        """Wait for what comes next; when nothing does for a moment, do what makes later steps faster."""
        if self._steps is not None:
            with self._failures_reported():
                self._steps.rest(self._poller.poll)
        self._poller.poll()

    def _deliver_results(self) -> None:
        if self._steps is not None:
            with self._failures_reported():
                self._steps.deliver_results()

    def _deliver(self, result: StepResult) -> None:
        if self._spec.rank == 0:
            self._results.send(result)

    def _take_masks(self) -> list[SlotMask]:
        """Return the masks of the step that is being computed, and keep the commands that come before them for later.

        Blocks until: they are there, or a `Stop` is.

        Raises:
            ProtocolError: this process was told to end while it waited.
        """
        # After a `Stop` no masks come any more, and nobody looks at what is drawn without them.
        while not (self._kept and isinstance(self._kept[-1], Stop)):
            command = self._subscriber.receive(timeout_s=0)
            if isinstance(command, TokenMasks):
                return command.masks
            if command is not None:
                self._kept.append(command)
                continue
            self._poller.poll()
            if self._steps is not None:
                self._steps.deliver_results()
            if self._stop is not None and self._stop.count:
                self._stop.acknowledge()
                if self._stop.count >= ABORT_SIGNALS:
                    raise ProtocolError("told to end before the masks of a step were there")
        return []

    def _close(self) -> None:
        """Close the sockets. Blocks until: what was sent has left, or the core has stopped listening."""
        if self._steps is not None:
            self._steps.close()
        self._subscriber.close()
        self._results.close()
        self._context.term()

    def _obey(self, command: WorkerCommand) -> None:
        self._sequence = command.sequence
        with self._failures_reported():
            reply = self._carry_out(command)
        if reply is not None:
            self._results.send(reply)

    @contextmanager
    def _failures_reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # process boundary: the core must hear why before this process ends
            failed = CommandFailed(
                sequence=self._sequence,
                rank=self._spec.rank,
                error_type=type(error).__name__,
                message=_told(error),
                traceback=traceback.format_exc(),
            )
            self._results.send(failed)
            self._close()
            raise

    def _carry_out(self, command: WorkerCommand) -> WorkerReply | None:
        match command:
            case StepPlan():
                if self._steps is None:
                    raise ProtocolError("a step was planned before the cache was allocated")
                self._steps.begin(command, self._take_masks)
                return None
            case TokenMasks():
                raise ProtocolError("masks came for no step that awaits them")
            case AllocateCache():
                self._allocate(command)
                return CacheReady(command.sequence, self._spec.rank)
            case Profile():
                return Acknowledged(command.sequence, self._spec.rank, self._profile(command.directory))
            case Stop():
                return None
            case _:
                assert_never(command)

    @torch.inference_mode()
    def _allocate(self, command: AllocateCache) -> None:
        try:
            self._steps = open_steps(
                self._model,
                self._spec.config,
                self._device,
                self._deliver,
                num_blocks=command.num_blocks,
                max_model_len=command.max_model_len,
            )
        except (RuntimeError, MemoryError) as error:  # what torch's allocator and the native one raise
            raise NotEnoughMemoryError(
                f"no memory for {command.num_blocks} KV blocks: {error}",
                hint="use a smaller --gpu-memory-utilization or --num-gpu-blocks-override",
            ) from error
        if (fd := self._steps.fileno()) is not None:
            self._poller.register(fd, zmq.POLLIN)

    def _profile(self, directory: str | None) -> str:
        """Start or stop the trace; return why that failed, "" when it did not. A full disk is no reason to end."""
        try:
            if directory is None:
                self._trace.stop()
            else:
                self._trace.start(Path(directory), None if self._steps is None else self._steps.forward)
        except OSError as error:
            logger.error("no trace: %s", error)
            return str(error)
        return ""


def _told(error: Exception) -> str:
    """Return what an error says, with what the user can do about it."""
    return f"{error} ({error.hint})" if isinstance(error, StartupError) and error.hint else str(error)
