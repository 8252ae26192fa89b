"""`EngineCore`: makes the parts of the core process, starts them in order, and ends them.

Decides nothing and moves no message: see `scheduler/`, `service.py` and `loop.py`.
"""

import gc
import logging
import time
from pathlib import Path

import msgspec
import zmq

from octavo.core_proc import invariants
from octavo.core_proc.cache.sizing import memory_table, plan_cache
from octavo.core_proc.grammar.compiler import GrammarCompiler
from octavo.core_proc.grammar.grammars import Grammars
from octavo.core_proc.log_entries import LogEntry, Planned, WorkersLost
from octavo.core_proc.loop import StepLoop
from octavo.core_proc.outbox import Outbox
from octavo.core_proc.recorder import Recorder
from octavo.core_proc.recovery.black_box import BlackBox, read_legacy
from octavo.core_proc.recovery.blame import Blame
from octavo.core_proc.recovery.supervisor import WorkerSupervisor
from octavo.core_proc.scheduler.observed import ObservedScheduler, Observer
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.service import FrontendService
from octavo.core_proc.waiting import Waiter
from octavo.core_proc.workers.local import LocalWorkerGroup
from octavo.protocol.channel import FrontendRouter
from octavo.protocol.config import CachePlan, ResolvedConfig
from octavo.protocol.control import CoreReady, CoreSpec
from octavo.protocol.curve import read_keys_of_engine
from octavo.protocol.events import EngineFacts
from octavo.protocol.lifecycle import EXIT_OK, Reporter, StopSignal
from octavo.protocol.pulse import PulseWriter

logger = logging.getLogger(__name__)

WORKER_MODULE = "octavo.worker_proc"

PIPELINE_DEPTH = 2
"""Steps in flight under `async_scheduling`: one computes while the next is planned."""

MIN_RESTART_TIMEOUT_S = 60.0
RESTART_PATIENCE = 10.0
"""Workers that are started again have this many times as long as the first ones needed, and a minute at least."""


class EngineCore:
    """One engine: its frontends' socket, its scheduler and its workers."""

    def __init__(
        self, spec: CoreSpec, reporter: Reporter, stop: StopSignal, worker_module: str = WORKER_MODULE
    ) -> None:
        """Bind the frontends' socket, so that a bad address fails before anything slow, and start the workers.

        Args:
            spec: what the parent asked for.
            reporter: to the parent.
            stop: the signals of this process.
            worker_module: what the workers run, by name.

        Raises:
            StartupError: the address cannot be bound.
        """
        self._spec = spec
        self._reporter = reporter
        self._stop = stop
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._worker_module = worker_module
        self._recorder: Recorder | None = None
        self._box: BlackBox | None = None
        self._supervisor: WorkerSupervisor | None = None
        self._compiler = GrammarCompiler(spec.config.grammar_timeout_s)
        with reporter.phase("binding sockets"):
            self._router = FrontendRouter(self._context, spec.address)
            if spec.remote_address:
                self._router.listen_remotely(spec.remote_address, read_keys_of_engine(spec.config))
            self._pulse_path = Path(spec.run_dir) / "pulse"
            self._pulse = PulseWriter(self._pulse_path)
            self._first_workers = self._make_workers(0)

    def run(self) -> int:
        """Start, serve until told to stop, and end; returns the exit code.

        Raises:
            StartupError: the engine did not come up.
            WorkerFailed: workers died again and again; every request has been ended and every frontend told.
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
            service.say_last_words(str(error) or type(error).__name__)
            raise
        service.say_goodbye()

    def _start(self) -> tuple[FrontendService, StepLoop, WorkerSupervisor]:
        start_s = time.monotonic()
        workers = self._first_workers
        with self._reporter.phase("starting workers"):
            workers.start(self._reporter, self._stop)
        plan = plan_cache(self._spec.config, workers.facts)
        config = msgspec.structs.replace(self._spec.config, max_model_len=plan.max_model_len)
        with self._reporter.phase("allocating the KV cache"):
            workers.allocate(plan, self._stop)
        for line in memory_table(config, workers.facts, plan).splitlines():
            logger.info("%s", line)
        scheduler = self._make_scheduler(config, plan)
        outbox = Outbox(self._router, self._spec.epoch, time.monotonic)
        facts = self._engine_facts(config, plan)
        blame = self._make_blame(scheduler)
        supervisor = self._supervisor = WorkerSupervisor(
            workers,
            self._make_workers,
            plan,
            scheduler,
            blame,
            time.monotonic,
            step_timeout_s=config.execute_model_timeout_s,
            start_timeout_s=max(MIN_RESTART_TIMEOUT_S, RESTART_PATIENCE * (time.monotonic() - start_s)),
            max_restarts=config.max_worker_restarts,
            on_loss=lambda: self._pulse.beat(has_work=True),
        )
        grammars = Grammars(scheduler, supervisor, self._compiler)
        service = FrontendService(
            self._router, outbox, scheduler, grammars, supervisor, blame, facts, self._stop, time.monotonic
        )
        depth = PIPELINE_DEPTH if config.async_scheduling else 1
        loop = StepLoop(service, scheduler, grammars, supervisor, self._pulse, depth)
        self._waiter = Waiter(self._router.socket, self._stop, [grammars.wake_fd], supervisor)
        # What lives from here on lives for good: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        self._reporter.mark_ready(CoreReady(plan, workers.facts))
        logger.info("engine ready at %s", self._spec.address)
        return service, loop, supervisor

    def _make_workers(self, generation: int) -> LocalWorkerGroup:
        """Start a group of workers. Those that follow the first one need not measure again."""
        return LocalWorkerGroup(
            self._spec.config,
            self._spec.run_dir,
            self._context,
            module=self._worker_module,
            log_level=self._spec.log_level,
            log_config=self._spec.log_config,
            generation=generation,
            facts=self._first_workers.facts if generation else self._spec.facts,
        )

    def _make_blame(self, scheduler: Scheduler) -> Blame:
        self._box = BlackBox(Path(self._spec.run_dir), self._pulse)
        blame = Blame(scheduler, self._box)
        predecessor = self._spec.predecessor_dir
        if predecessor and (left := read_legacy(Path(predecessor))) is not None:
            legacy, exposed = left
            blame.take_core_death(legacy, exposed, self._spec.predecessor_end)
        return blame

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

    def _engine_facts(self, config: ResolvedConfig, plan: CachePlan) -> EngineFacts:
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
        )

    def _close(self) -> None:
        """End the workers, if they still run, and give what was said to the frontends time to leave."""
        self._router.close()
        (self._supervisor or self._first_workers).kill()
        self._pulse.close()
        if self._box:
            self._box.close()
        if self._recorder:
            self._recorder.close()
        self._compiler.close()
        self._context.term()


def _check_invariants(scheduler: Scheduler, entry: LogEntry) -> None:
    if isinstance(entry, Planned):
        invariants.check_plan(scheduler, entry.plan)
    elif isinstance(entry, WorkersLost):
        invariants.check_loss(scheduler)
    else:
        invariants.check(scheduler)
