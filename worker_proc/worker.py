"""The worker after its imports: load, measure, then execute the core's commands one by one.

Computes nothing itself: `executor` runs plans, `models` and `runners` compute steps, `sampling` samples.
"""

import gc
import logging
import time
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
from octavo.protocol.curve import GroupKeys
from octavo.protocol.env import Env
from octavo.protocol.errors import NotEnoughMemoryError, ProtocolError, StartupError
from octavo.protocol.lifecycle import EXIT_OK, StartupReporter, StopSignal
from octavo.protocol.steps import StepPlan, StepResult, TokenMask, TokenMasks
from octavo.protocol.worker_commands import (
    Acknowledged,
    AllocateCache,
    CacheReady,
    CommandFailed,
    JoinWeightTransfer,
    LoadBlockFiles,
    LoadBlocks,
    LoadWeights,
    Profile,
    ReleaseMemory,
    RestoreWeights,
    SaveBlockFiles,
    StopWorker,
    StoreBlocks,
    WarmedUp,
    WarmUp,
    WeightsCommand,
    WorkerCommand,
    WorkerReply,
)
from octavo.worker_proc.cache_calibration import measure_cache_scales
from octavo.worker_proc.device import open_device
from octavo.worker_proc.device.base import Device
from octavo.worker_proc.executor.executor import PipelinedExecutor
from octavo.worker_proc.executor.open import open_executor
from octavo.worker_proc.executor.trace import StepTrace
from octavo.worker_proc.facts import measure
from octavo.worker_proc.kernels import open_kernels
from octavo.worker_proc.live_model import LiveModel
from octavo.worker_proc.lora.loader import AdapterLoader, open_adapters
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.parallel.open import Peers, join_peers
from octavo.worker_proc.sampling.processor_loading import load_processors
from octavo.worker_proc.sampling.processors import Processors
from octavo.worker_proc.weights.load import load_model
from octavo.worker_proc.weights.transfer import WeightReceiver

logger = logging.getLogger(__name__)

ABORT_SIGNALS = 2
"""Number of SIGTERMs that end a worker. The first may go to the whole process group while the core still drains."""


class Worker:
    """One rank: a model and, after `AllocateCache`, its cache and a batch."""

    def __init__(
        self,
        spec: WorkerSpec,
        model: Model,
        device: Device,
        processors: Processors | None = None,
        adapters: AdapterLoader | None = None,
    ) -> None:
        self._spec = spec
        self._live = LiveModel(spec.config, model, self._use_model, WeightReceiver(spec.rank, device.torch_device))
        self._device = device
        self._processors = processors
        self._adapters = adapters
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        keys = GroupKeys(spec.place.secret.encode()).client if spec.place and spec.place.secret else None
        self._subscriber = Subscriber(self._context, spec.plan_address, keys)
        self._results = ResultPush(self._context, spec.result_address, keys)
        self._executor: PipelinedExecutor | None = None
        self._allocation: AllocateCache | None = None
        """Cache to allocate once there are weights."""
        self._sequence = 0
        """Sequence number of the latest command."""
        self._deferred: deque[WorkerCommand] = deque()
        """Commands that arrived while a step waited for its masks. They are executed after the step."""
        self._stop: StopSignal | None = None
        self._poller = zmq.Poller()
        self._poller.register(self._subscriber.socket, zmq.POLLIN)
        self._trace = StepTrace(spec.rank)

    @classmethod
    def start(cls, spec: WorkerSpec, reporter: StartupReporter) -> "Worker":
        """Load the model, measure the device unless its facts are known, subscribe to the core and report ready.

        Raises:
            StartupError: the start failed; carries the root cause.
        """
        config = spec.config
        env = Env.read()
        with reporter.phase("opening the device"):
            number = spec.device_number
            if number < 0:
                number = config.engine_place * spec.world_size + spec.rank
            device = open_device(config, number=number, launches_early=env.launches_early)
        free_bytes = device.free_bytes()
        library = None
        if config.device == "cpu":
            has_other_nodes = spec.place is not None
            library = open_kernels(config, env, reporter.phase, number=number, has_other_nodes=has_other_nodes)
        peers = Peers(None, None, lambda: None)
        if spec.world_size > 1 or config.is_lock_step:
            with reporter.phase("joining the other workers"):
                peers = join_peers(spec, library, device.torch_device, env)
                peers.barrier()  # every rank measures its free memory before any rank allocates
        with reporter.phase("loading weights"):
            model = load_model(
                config,
                reporter.progress,
                device=device.torch_device,
                library=library,
                cache_dir=env.cache_dir,
                rank=spec.rank,
                group=peers.group,
                exchange=peers.stages,
                engines=peers.engines,
            )
        adapters = None
        if config.lora is not None:
            with reporter.phase("making slots for adapters"):
                adapters = open_adapters(model, config)
        if (facts := spec.facts) is None:
            with reporter.phase("profiling memory"):
                facts = measure(model, device, config, rank=spec.rank, free_bytes=free_bytes, adapters=adapters)
        if config.calculate_kv_scales:
            with reporter.phase("measuring the scales of keys and values"):
                model.cache_scales = measure_cache_scales(model, config, device.stream())
        processors = None
        if config.logits_processors and model.stage.is_last:
            with reporter.phase("loading logits processors"):
                processors = load_processors(config, device.torch_device)
        gc.freeze()
        gc.enable()
        worker = cls(spec, model, device, processors, adapters)
        reporter.mark_ready(WorkerReady(facts))
        return worker

    def run(self, stop: StopSignal) -> int:
        """Execute commands until `StopWorker` or the second SIGTERM. Return the exit code.

        Blocks in a poll, so waiting uses no processor time.
        """
        self._stop = stop
        self._poller.register(stop.fileno(), zmq.POLLIN)
        while stop.count < ABORT_SIGNALS:
            self._deliver_results()
            command = self._deferred.popleft() if self._deferred else self._subscriber.receive(timeout_s=0)
            if command is None:
                self._wait_for_command()
                stop.acknowledge()
            elif isinstance(command, StopWorker):
                break
            else:
                self._handle(command)
        self._trace.stop()
        self._close()
        return EXIT_OK

    def _wait_for_command(self) -> None:
        """Wait for a command or a result. If nothing arrives for a moment, prepare for later steps."""
        if self._executor is not None:
            with self._failures_reported():
                self._executor.on_idle(self._poller.poll)
        self._poller.poll()

    def _deliver_results(self) -> None:
        if self._executor is not None:
            with self._failures_reported():
                self._executor.deliver_results()
                for load in self._executor.loader.take_finished() if self._executor.loader else ():
                    self._results.send(load.reply(self._spec.rank))

    def _deliver(self, result: StepResult) -> None:
        if self._spec.rank == self._spec.config.answering_rank:
            self._results.send(result)

    def _receive_masks(self) -> list[TokenMask]:
        """Return the masks of the current step; defer commands that arrive before them.

        Blocks until the masks or a `StopWorker` arrive.

        Raises:
            ProtocolError: this process was told to stop while it waited.
        """
        # No masks follow a `StopWorker`, and tokens sampled without them are never read.
        while not (self._deferred and isinstance(self._deferred[-1], StopWorker)):
            command = self._subscriber.receive(timeout_s=0)
            if isinstance(command, TokenMasks):
                return command.unpack()
            if command is not None:
                self._deferred.append(command)
                continue
            self._poller.poll()
            if self._executor is not None:
                self._executor.deliver_results()
            if self._stop is not None and self._stop.count:
                self._stop.acknowledge()
                if self._stop.count >= ABORT_SIGNALS:
                    raise ProtocolError("told to stop before the masks of a step arrived")
        return []

    def _close(self) -> None:
        """Close the sockets. Blocks until all messages are sent or the core has closed its side."""
        if self._executor is not None:
            self._executor.close()
        self._subscriber.close()
        self._results.close()
        self._context.term()

    def _handle(self, command: WorkerCommand) -> None:
        self._sequence = command.sequence
        with self._failures_reported():
            reply = self._execute(command)
        if reply is not None:
            self._results.send(reply)

    @contextmanager
    def _failures_reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # process boundary: report the cause to the core before this process ends
            failed = CommandFailed(
                sequence=self._sequence,
                rank=self._spec.rank,
                error_type=type(error).__name__,
                message=_error_text(error),
                traceback=traceback.format_exc(),
            )
            self._results.send(failed)
            self._close()
            raise

    def _execute(self, command: WorkerCommand) -> WorkerReply | None:
        match command:
            case StepPlan():
                self._ready_executor.begin(command, self._receive_masks)
                return None
            case LoadBlocks() | StoreBlocks():
                self._ready_executor.transfer_blocks(command)
                return None
            case TokenMasks() if not self._live.stage.is_last:
                return None
            case TokenMasks():
                raise ProtocolError("token masks arrived, but no step awaits any")
            case AllocateCache():
                if self._live.has_weights:
                    self._allocate(command, self._live.model)
                else:
                    self._allocation = command
                return CacheReady(command.sequence, self._spec.rank)
            case WarmUp():
                return self._warm_up(command.sequence)
            case Profile():
                return Acknowledged(command.sequence, self._spec.rank, self._profile(command.directory))
            case SaveBlockFiles() | LoadBlockFiles():
                fault = self._ready_executor.exchange_files(command, self._spec.rank)
                return Acknowledged(command.sequence, self._spec.rank, fault)
            case JoinWeightTransfer() | LoadWeights() | ReleaseMemory() | RestoreWeights():
                return self._change_weights(command)
            case StopWorker():
                return None
            case _:
                assert_never(command)

    @property
    def _ready_executor(self) -> PipelinedExecutor:
        if self._executor is None:
            raise ProtocolError("a step was planned before the cache was allocated")
        return self._executor

    def _change_weights(self, command: WeightsCommand) -> Acknowledged:
        fault = digest = ""
        match command:
            case JoinWeightTransfer(_, group):
                fault = self._live.receiver.join(group)
            case LoadWeights():
                fault, digest = self._live.load(command, in_place=self._executor is not None and not self._is_on_host)
            case ReleaseMemory(_, level):
                self._release_memory(level)
            case RestoreWeights():
                self._live.restore()
            case _:
                assert_never(command)
        self._allocate_late()
        return Acknowledged(command.sequence, self._spec.rank, fault, digest)

    @property
    def _is_on_host(self) -> bool:
        """Whether the host computes. Then no captured graph depends on the addresses of weights."""
        return self._device.torch_device.type == "cpu" and self._device.stream() is None

    def _use_model(self, model: Model | None) -> None:
        if self._adapters is not None and model is not None:
            self._adapters.move_to(model)
        if self._executor is not None:
            self._executor.use_model(model)

    def _release_memory(self, level: int) -> None:
        """Release the cache, and memory of weights."""
        if self._executor is not None:
            for fd in self._executor.filenos:
                self._poller.unregister(fd)
            self._executor.close()
            self._executor = None
        self._allocation = None
        self._live.release(level)

    def _allocate_late(self) -> None:
        """Allocate the cache that was requested while there were no weights."""
        if self._allocation is not None and self._live.has_weights:
            command, self._allocation = self._allocation, None
            self._allocate(command, self._live.model)

    @torch.inference_mode()
    def _allocate(self, command: AllocateCache, model: Model) -> None:
        # The last number is the number of state slots, if the model has states; the others are equal.
        num_states = command.num_blocks[-1] if model.state_group else 0
        num_blocks = command.num_blocks[0] if model.cache_groups else 0
        try:
            self._executor = open_executor(
                model,
                self._spec.config,
                self._device.stream(),
                self._deliver,
                num_blocks=num_blocks,
                num_states=num_states,
                num_host_blocks=command.num_host_blocks,
                num_host_states=command.num_host_states,
                rank=self._spec.rank,
                max_model_len=command.max_model_len,
                processors=self._processors,
                adapters=self._adapters,
            )
        except (RuntimeError, MemoryError) as error:  # raised by torch's allocator and by the native one
            raise NotEnoughMemoryError(
                f"no memory for {num_blocks} KV blocks, {num_states} states, or evicted ones in host memory: {error}",
                hint="use a smaller --gpu-memory-utilization, --num-gpu-blocks-override or --kv-offloading-size",
            ) from error
        if self._spec.config.interrupts_plans and not model.state_group:
            self._executor.has_command = self._subscriber.has_command
        for fd in self._executor.filenos:
            self._poller.register(fd, zmq.POLLIN)

    def _warm_up(self, sequence: int) -> WarmedUp:
        if self._allocation is not None:  # weights come later, and the first steps wait for this preparation
            return WarmedUp(sequence, self._spec.rank)
        if self._executor is None:
            raise ProtocolError("a worker was told to warm up before the cache was allocated")
        started_s, free_bytes = time.perf_counter(), self._device.free_bytes()
        try:
            num_graphs = self._executor.warm_up()
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, RuntimeError) and "out of memory" not in str(error):
                raise
            raise NotEnoughMemoryError(
                f"no memory for the graphs of steps: {error}",
                hint="use a smaller --gpu-memory-utilization or --max-cudagraph-capture-size, or --enforce-eager",
            ) from error
        elapsed_s = time.perf_counter() - started_s
        graph_bytes = max(0, free_bytes - self._device.free_bytes()) if num_graphs else 0
        return WarmedUp(sequence, self._spec.rank, elapsed_s, num_graphs, graph_bytes)

    def _profile(self, directory: str | None) -> str:
        """Start or stop the trace. Return the error, "" if there is none. A full disk must not end the worker."""
        try:
            if directory is None:
                self._trace.stop()
            else:
                self._trace.start(Path(directory), None if self._executor is None else self._executor.runner.programs)
        except OSError as error:
            logger.error("the trace was not started or written: %s", error)
            return str(error)
        return ""


def _error_text(error: Exception) -> str:
    """Return the message of an error, with its hint if it has one."""
    return f"{error} ({error.hint})" if isinstance(error, StartupError) and error.hint else str(error)
