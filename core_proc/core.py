"""`EngineCore`: creates the parts of the core process, starts them in order, and stops them.

It neither decides nor handles messages: see `scheduler/`, `service.py` and `loop.py`.
"""

import functools
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from octavo.core_proc import invariants
from octavo.core_proc.block_transfers import BlockTransfers
from octavo.core_proc.cache.sizing import memory_table, plan_cache
from octavo.core_proc.collector import IdleCollector
from octavo.core_proc.file_store import FileStore, folder_name, open_files
from octavo.core_proc.file_watch import FIRST_LIST_S, RESTART_LIST_S, FileWatch
from octavo.core_proc.grammar.compiler import GrammarCompiler
from octavo.core_proc.grammar.grammars import Grammars
from octavo.core_proc.kv_events import KVEventPublisher
from octavo.core_proc.log_entries import LogEntry, Planned, WorkersLost
from octavo.core_proc.loop import StepLoop
from octavo.core_proc.outbox import Outbox
from octavo.core_proc.recorder import Recorder
from octavo.core_proc.recovery.crash_attribution import CrashAttribution
from octavo.core_proc.recovery.crash_journal import CrashJournal, read_crash_record
from octavo.core_proc.recovery.supervisor import WorkerSupervisor
from octavo.core_proc.scheduler.observed import ObservedScheduler, Observer
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.service import FrontendService
from octavo.core_proc.transfer.base import NoConnector, RequestConnector
from octavo.core_proc.transfer.open import open_connector
from octavo.core_proc.transfer.plugin import PluginConnector
from octavo.core_proc.waiter import Waiter
from octavo.core_proc.weights.control import WeightsControl
from octavo.core_proc.weights.journal import WeightsJournal, read_weights_record
from octavo.core_proc.weights.state import WeightsState
from octavo.core_proc.workers.launch import WORKER_MODULE, launch_workers
from octavo.protocol.channel import FrontendRouter
from octavo.protocol.config import CachePlan, DeviceFacts, ResolvedConfig
from octavo.protocol.config.kv_events import KVEventsConfig
from octavo.protocol.control import CoreReady, CoreSpec
from octavo.protocol.curve import read_keys_of_engine
from octavo.protocol.errors import StartupError
from octavo.protocol.events import EngineFacts
from octavo.protocol.identity import identity_of, identity_parts, weights_digest
from octavo.protocol.kv_connector import KVConnectorRole
from octavo.protocol.kv_connector_loading import open_kv_connector
from octavo.protocol.lifecycle import EXIT_OK, StartupReporter, StopSignal
from octavo.protocol.pulse import PulseWriter
from octavo.protocol.weights import WeightsRecord

logger = logging.getLogger(__name__)

PLANNED_AHEAD = 1
"""Steps in flight under `async_scheduling`, in addition to the one that each pipeline stage computes."""

MIN_RESTART_TIMEOUT_S = 60.0
RESTART_TIMEOUT_FACTOR = 10.0
"""Timeout for restarting the workers, as a multiple of the duration of their first start."""


class EngineCore:
    """One engine: the socket for frontends, the scheduler and the workers."""

    def __init__(
        self, spec: CoreSpec, reporter: StartupReporter, stop: StopSignal, worker_module: str = WORKER_MODULE
    ) -> None:
        """Bind the frontends' socket and start the workers. Binding comes first, so that a bad address fails quickly.

        Args:
            spec: sent by the parent process.
            reporter: reports start-up progress to the parent process.
            stop: the signals of this process.
            worker_module: the module that each worker runs.

        Raises:
            StartupError: the address cannot be bound.
        """
        self._spec = spec
        self._reporter = reporter
        self._stop = stop
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._recorder: Recorder | None = None
        self._journal: CrashJournal | None = None
        self._publisher: KVEventPublisher | None = None
        self._connector: RequestConnector = NoConnector()
        self._watch: FileWatch | None = None
        self._supervisor: WorkerSupervisor | None = None
        self._compiler = GrammarCompiler(spec.config.structured_output.grammar_timeout_s)
        with reporter.phase("binding sockets"):
            self._router = FrontendRouter(self._context, spec.address)
            if spec.remote_address:
                self._router.listen_remotely(spec.remote_address, read_keys_of_engine(spec.config))
            self._pulse_path = Path(spec.run_dir) / "pulse"
            self._pulse = PulseWriter(self._pulse_path)
            self._first_workers = launch_workers(spec, self._context, worker_module)

    def run(self) -> int:
        """Start, serve until stopped, and return the exit code.

        Raises:
            StartupError: the engine did not start.
            WorkerFailed: the workers keep failing. Every frontend has been notified.
        """
        try:
            service, loop, workers = self._start()
            self._serve(service, loop)
            workers.stop()
        finally:
            self._close()
        return EXIT_OK

    def _serve(self, service: FrontendService, loop: StepLoop) -> None:
        try:
            loop.run(self._waiter)
        except BaseException as error:
            service.announce_failure(str(error) or type(error).__name__)
            raise
        service.announce_shutdown()

    def _start(self) -> tuple[FrontendService, StepLoop, WorkerSupervisor]:
        start_s = time.monotonic()
        workers = self._first_workers
        record = self._weights_record()
        with self._reporter.phase("starting workers"):
            workers.start(self._reporter, self._stop)
        plan = plan_cache(self._spec.config, workers.facts)
        config = msgspec.structs.replace(self._spec.config, max_model_len=plan.max_model_len)
        with self._reporter.phase("allocating the KV cache"):
            workers.allocate(plan, self._stop)
        with self._reporter.phase("warming up"):
            workers.warm_up(self._stop)
        for line in memory_table(config, workers.facts, plan).splitlines():
            logger.info("%s", line)
        scheduler = self._make_scheduler(config, plan)
        if config.kv_events is not None:
            self._publish_events(config.kv_events, scheduler)
        outbox = Outbox(self._router, self._spec.epoch, time.monotonic)
        facts = self._engine_facts(config, plan, record, workers.facts)
        attribution = self._make_attribution(scheduler)
        supervisor = self._make_supervisor(config, plan, scheduler, attribution, time.monotonic() - start_s)
        grammars = Grammars(scheduler, supervisor, self._compiler)
        folder, plugin = self._store_blocks(config, plan, scheduler, supervisor, facts.identity)
        scheduler.hooks.add(BlockTransfers(scheduler, supervisor, folder))
        control = self._make_control(config, scheduler, supervisor, record, workers.facts)
        self._connector = plugin or open_connector(
            self._spec,
            plan,
            workers.facts,
            scheduler,
            supervisor,
            identity=lambda: control.facts.identity,
            may_load=lambda: control.may_plan,
        )
        collector = IdleCollector()
        service = FrontendService(
            self._router,
            outbox,
            scheduler,
            grammars,
            supervisor,
            attribution,
            facts,
            self._stop,
            time.monotonic,
            collector=collector,
            weights=control,
            connector=self._connector,
        )
        depth = config.pipeline_parallel_size + (PLANNED_AHEAD if config.async_scheduling else 0)
        loop = StepLoop(service, scheduler, supervisor, self._pulse, depth)
        self._waiter = Waiter(self._router.socket, self._stop, scheduler.hooks.wake_fds, supervisor)
        collector.start(time.monotonic())
        if self._watch is not None:
            self._find_files(self._watch, scheduler)
        self._reporter.mark_ready(CoreReady(plan, workers.facts))
        logger.info("engine ready at %s", self._spec.address)
        return service, loop, supervisor

    def _make_supervisor(
        self,
        config: ResolvedConfig,
        plan: CachePlan,
        scheduler: Scheduler,
        attribution: CrashAttribution,
        start_duration_s: float,
    ) -> WorkerSupervisor:
        self._supervisor = WorkerSupervisor(
            self._first_workers,
            plan,
            scheduler,
            attribution,
            time.monotonic,
            step_timeout_s=config.recovery.execute_model_timeout,
            start_timeout_s=max(MIN_RESTART_TIMEOUT_S, RESTART_TIMEOUT_FACTOR * start_duration_s),
            max_restarts=config.recovery.max_worker_restarts,
            on_loss=lambda: self._pulse.beat(has_work=True),
        )
        return self._supervisor

    def _weights_record(self) -> WeightsRecord:
        """Return the known state of the weights. The workers are starting meanwhile."""
        predecessor = self._spec.predecessor_dir
        record = read_weights_record(Path(predecessor)) if predecessor else WeightsRecord()
        if record.version:
            return record
        with self._reporter.phase("identifying the weights"):
            digest = _digest_of_weights(self._spec.config)
            return msgspec.structs.replace(record, digest=digest, start_digest=digest)

    def _make_control(
        self,
        config: ResolvedConfig,
        scheduler: Scheduler,
        supervisor: WorkerSupervisor,
        record: WeightsRecord,
        workers: Sequence[DeviceFacts],
    ) -> WeightsControl:
        state = WeightsState(
            record,
            WeightsJournal(Path(self._spec.run_dir)),
            functools.cache(lambda digest, version: identity_of(config, digest, workers, version)),
            self._spec.weights_dir,
            lambda: weights_digest(self._spec.config.model),
        )
        control = WeightsControl(scheduler, supervisor, state)
        supervisor.on_replaced = control.on_replaced
        return control

    def _make_attribution(self, scheduler: Scheduler) -> CrashAttribution:
        self._journal = CrashJournal(Path(self._spec.run_dir), self._pulse)
        attribution = CrashAttribution(scheduler, self._journal)
        predecessor = self._spec.predecessor_dir
        if predecessor and (left := read_crash_record(Path(predecessor))) is not None:
            record, in_flight = left
            attribution.record_core_crash(record, in_flight, self._spec.predecessor_end)
        return attribution

    def _make_scheduler(self, config: ResolvedConfig, plan: CachePlan) -> Scheduler:
        observers: list[Observer] = []
        if config.record_steps:
            self._recorder = Recorder(Path(config.record_steps), config, plan)
            observers.append(self._recorder)
        if self._spec.check_invariants:
            observers.append(_check_invariants)
        if observers:
            return ObservedScheduler(config, plan, time.monotonic, observers)
        return Scheduler(config, plan, time.monotonic)

    def _publish_events(self, config: KVEventsConfig, scheduler: Scheduler) -> None:
        index, is_replacement = self._spec.config.engine_index, bool(self._spec.replaced_epoch)
        groups = scheduler.cache.groups
        self._publisher = KVEventPublisher(self._context, config, index, groups, is_replacement=is_replacement)
        self._publisher.observe(scheduler.cache)
        scheduler.hooks.add(self._publisher)

    def _store_blocks(
        self, config: ResolvedConfig, plan: CachePlan, scheduler: Scheduler, workers: WorkerSupervisor, identity: str
    ) -> tuple[str, PluginConnector | None]:
        """Set up storage of KV blocks in files or in the user's connector, if configured.

        Returns:
            The folder of the files or the namespace of the connector's keys, "" if neither is used; and the connector.
        """
        if not config.stores_blocks:
            return "", None
        name, connector, plugin = folder_name(config, plan, identity), config.kv_connector, None
        if connector is None:
            path = Path(config.kv_offloading_path)
            name, self._watch = open_files(path, name, config.kv_offloading_disk_bytes)
            FileStore(scheduler, workers, name, self._watch, plan.host_block_bytes, plan.host_state_bytes)
        else:
            plugin = PluginConnector(
                open_kv_connector(config, KVConnectorRole.SCHEDULER),
                scheduler,
                name,
                loads=connector.loads,
                timeout_s=config.recovery.execute_model_timeout,
            )
            FileStore(
                scheduler,
                workers,
                name,
                plugin,
                plan.host_block_bytes,
                plan.host_state_bytes,
                finds=connector.loads,
                saves=connector.saves,
            )
        return name, plugin

    def _find_files(self, watch: FileWatch, scheduler: Scheduler) -> None:
        """Wait for the list of files, so that the first request can use blocks that an earlier engine has written."""
        with self._reporter.phase("listing the files of KV blocks"):
            if not watch.wait_listed(RESTART_LIST_S if self._spec.predecessor_dir else FIRST_LIST_S):
                logger.info("still listing the files of KV blocks; requests cannot use them until the list is complete")
        scheduler.hooks.on_step()

    def _engine_facts(
        self, config: ResolvedConfig, plan: CachePlan, record: WeightsRecord, workers: Sequence[DeviceFacts]
    ) -> EngineFacts:
        return EngineFacts(
            epoch=self._spec.epoch,
            model=config.model.model_path,
            served_model_names=config.served_model_names,
            max_model_len=plan.max_model_len,
            vocab_size=config.model.vocab_size,
            block_size=plan.block_size,
            num_blocks=plan.num_blocks,
            max_num_seqs=config.max_num_seqs,
            max_logprobs=config.max_logprobs,
            dtype=config.dtype,
            device=config.device,
            config=msgspec.msgpack.encode(config),
            pulse_path=str(self._pulse_path),
            replaced_epoch=self._spec.replaced_epoch,
            identity=identity_of(config, record.digest, workers, record.version),
            weights_digest=record.digest,
            weight_version=record.version,
            weight_label=record.label,
            weights_dir=self._spec.weights_dir,
            model_impl=workers[0].model_impl,
            variant_module=workers[0].variant_module,
            identity_parts=identity_parts(config, workers),
        )

    def _close(self) -> None:
        """Kill the workers if they still run, and give the last messages to frontends time to be sent."""
        self._router.close()
        (self._supervisor or self._first_workers).kill()
        self._pulse.close()
        if self._journal:
            self._journal.close()
        if self._recorder:
            self._recorder.close()
        self._compiler.close()
        if self._publisher:
            self._publisher.close()
        self._connector.close()
        if self._watch:
            self._watch.close()
        self._context.term()


def _digest_of_weights(config: ResolvedConfig) -> str:
    """Return the digest of the weights that the workers load.

    Raises:
        StartupError: a file cannot be read.
    """
    try:
        return weights_digest(config.model)
    except OSError as error:
        message = f"cannot read the weights in {config.model.model_path}: {error}"
        raise StartupError(message, phase="identifying the weights") from error


def _check_invariants(scheduler: Scheduler, entry: LogEntry) -> None:
    if isinstance(entry, Planned):
        invariants.check_plan(scheduler, entry.plan)
    elif isinstance(entry, WorkersLost):
        invariants.check_loss(scheduler)
    else:
        invariants.check(scheduler)
