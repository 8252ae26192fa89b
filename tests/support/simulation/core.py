"""One life of a core: the real loop, service, outbox, scheduler and grammars, over simulated sockets and workers."""

import random
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from typing import Any

from core_fakes import cache_plan, core_config
from msgspec.structs import replace
from service_fakes import weights_of

from octavo.core_proc import invariants
from octavo.core_proc.block_transfers import BlockTransfers
from octavo.core_proc.collector import IdleCollector
from octavo.core_proc.grammar.grammars import Grammars
from octavo.core_proc.log_entries import LogEntry, Opened, Planned, WorkersLost
from octavo.core_proc.loop import StepLoop
from octavo.core_proc.outbox import Outbox
from octavo.core_proc.recorder import replay
from octavo.core_proc.recovery.crash_attribution import CrashAttribution
from octavo.core_proc.recovery.supervisor import WorkerSupervisor
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.delta import StepRecord
from octavo.core_proc.scheduler.observed import ObservedScheduler
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.service import FrontendService
from octavo.core_proc.transfer.base import NoConnector
from octavo.core_proc.workers.group import WorkerFailed
from octavo.protocol.channel import PeerLost
from octavo.protocol.codec import event_codec, request_codec
from octavo.protocol.config import CacheGroupSpec, CachePlan
from octavo.protocol.events import EngineFacts, Event
from octavo.protocol.ids import RequestId
from octavo.protocol.requests import FrontendMessage, Submit
from simulation.block_store import store_blocks
from simulation.connector import close_simulated
from simulation.crash_journal import SimulatedCrashJournal
from simulation.files import SimulatedFiles
from simulation.grammar import SimulatedCompiler
from simulation.group import SimulatedGroup
from simulation.ranks import RankedGroup
from simulation.scenario import CORE_POISON_MARK, INTAKE_POISON_MARK
from simulation.world import Action, Pipe, Process, World

REQUESTS, EVENTS = request_codec(), event_codec()

RESTART_TIMEOUT_STEPS = 300
"""A start of workers that takes longer than this many steps has failed."""

POLL_GRAIN_S = 0.001
"""The shortest sleep: `poll` counts in milliseconds."""


class CoreKilled(BaseException):
    """The core dies at this operation, before its effect."""


class SimulatedRouter:
    """The core's end of all connections; replaces `FrontendRouter`."""

    def __init__(self, process: "SimulatedCore", max_received_at_once: int) -> None:
        self.malformed_frames = 0
        self._process = process
        self._max_received_at_once = max_received_at_once
        self._arrivals: deque[tuple[bytes, Pipe]] = deque()
        """The sender of each message, in order of arrival."""
        self._peers: dict[bytes, Pipe] = {}
        self.num_read: Counter[tuple[bytes, RequestId]] = Counter()
        """How many submissions of each request the core has read."""

    @property
    def has_messages(self) -> bool:
        """True when `receive` returns something."""
        return bool(self._arrivals)

    def attach(self, peer: bytes, to_peer: Pipe) -> None:
        """Connect the peer."""
        self._peers[peer] = to_peer

    def detach(self, peer: bytes) -> None:
        """Disconnect the peer."""
        self._peers.pop(peer, None)

    def note_arrival(self, peer: bytes, from_peer: Pipe) -> None:
        """A message of the peer has arrived."""
        self._arrivals.append((peer, from_peer))
        self._process.wake(has_messages=True)

    def receive(self) -> list[tuple[bytes, FrontendMessage]]:
        """Return what has arrived, with each sender's identity."""
        received = []
        while self._arrivals and len(received) < self._max_received_at_once:
            peer, pipe = self._arrivals.popleft()
            frames = pipe.take()
            assert frames is not None
            request = REQUESTS.decode(*frames)
            if isinstance(request, Submit):
                self.num_read[peer, request.request_id] += 1
            received.append((peer, request))
        return received

    def send(self, peer: bytes, event: Event) -> bool:
        """Send an event; False when the peer reads too slowly.

        Raises:
            PeerLost: no peer has this identity any more.
        """
        self._process.operate()
        pipe = self._peers.get(peer)
        if pipe is None:
            raise PeerLost(f"frontend {peer.hex()} is gone")
        return pipe.send(EVENTS.encode(event))


class SimulatedStop:
    """The signals of the core; replaces `StopSignal`."""

    count = 0


class SimulatedPulse:
    """Counts beats; replaces `PulseWriter`."""

    def beat(self, *, has_work: bool) -> None:
        """Do nothing: the simulation has no observer."""


class SimulatedService(FrontendService):
    """The real service, which some requests crash when it handles them."""

    on_poison: Action

    def _accept(self, client: bytes, submit: Submit) -> list[ClientEvent]:
        if INTAKE_POISON_MARK in submit.request_id:
            self.on_poison()
        return super()._accept(client, submit)


class SimulatedCore(Process):
    """One core process, from its start to its end.

    Args:
        world: the clock.
        rng: draws random choices.
        engine: changes to the configuration of a small engine.
        num_blocks: number of blocks of its cache.
        groups: groups of its cache.
        epoch: the number of this life.
        step_scale: typical duration of a step, in seconds.
        max_backlog_events: a frontend with a larger backlog is dropped.
        predecessor: the core that has died; None: there was none.
        files: files of KV blocks.
        host_block_s: see `CachePlan`.
        num_ranks: number of ranks of its workers.
        is_observed: check all invariants after each call of the scheduler, and replay all of them at the end.
    """

    # long: one part after another
    def __init__(
        self,
        world: World,
        rng: random.Random,
        engine: dict[str, Any],
        num_blocks: int,
        groups: Sequence[CacheGroupSpec],
        epoch: int,
        step_scale: float,
        max_backlog_events: int,
        predecessor: "SimulatedCore | None",
        *,
        files: SimulatedFiles,
        host_block_s: float = 0.0,
        num_ranks: int = 1,
        is_observed: bool,
    ) -> None:
        super().__init__(world)
        self.config = core_config(**engine)
        copies_s = {"host_block_s": host_block_s, "host_state_s": host_block_s}  # a state has the bytes of a block
        self.plan = replace(cache_plan(self.config, num_blocks, groups), **copies_s)
        self._files = files
        self.stop_signal = SimulatedStop()
        self.entries: list[LogEntry] = []
        self.router = SimulatedRouter(self, rng.choice([1, 4, 256]))
        self.on_exit: Action = lambda: None
        self.on_loss: Action = lambda: None
        """Called when its workers have died."""
        self.has_said_goodbye = False
        """True if it ended in order, and not because the time for slow frontends was over."""
        self.has_met_poison = False
        """True if a request killed it."""
        self.ended_at = 0.0
        self._rng = rng
        self._operations_left: int | None = None
        self._has_messages = self._has_events = self._is_awake = False
        self._alarm = 0.0
        self._step_scale = step_scale
        self._turn_scale = step_scale / 20
        self.num_groups = 0
        self.num_ranks = num_ranks
        self.scheduler = self._scheduler(is_observed)
        self._make_group().start_at_once(self.plan)
        self.journal = SimulatedCrashJournal()
        attribution = CrashAttribution(self.scheduler, self.journal)
        if predecessor is not None:
            attribution.record_core_crash(*predecessor.journal.read(), "the core died")
        self.supervisor = self._supervisor(attribution)
        self.outbox = Outbox(self.router, epoch, lambda: world.now, max_backlog_events)
        compiler = SimulatedCompiler(
            lambda action: self.after(step_scale * rng.expovariate(0.5), action), lambda: self.wake(has_events=True)
        )
        self.grammars = Grammars(self.scheduler, self.supervisor, compiler)
        self._connector = store_blocks(
            self, self.scheduler, self.supervisor, files, step_scale, lambda: self.wake(has_events=True)
        )
        self.scheduler.hooks.add(BlockTransfers(self.scheduler, self.supervisor))
        self.service = self._service(attribution, epoch)
        self.service.on_poison = self._die_of_poison
        depth = self.config.pipeline_parallel_size + self.config.async_scheduling
        self.loop = StepLoop(self.service, self.scheduler, self.supervisor, SimulatedPulse(), depth)

    def _supervisor(self, attribution: CrashAttribution) -> WorkerSupervisor:
        return WorkerSupervisor(
            self.group,
            self.plan,
            self.scheduler,
            attribution,
            lambda: self.world.now,
            step_timeout_s=self.config.recovery.execute_model_timeout,
            start_timeout_s=RESTART_TIMEOUT_STEPS * self._step_scale,
            max_restarts=self.config.recovery.max_worker_restarts,
            on_loss=lambda: self.on_loss(),
        )

    def _service(self, attribution: CrashAttribution, epoch: int) -> SimulatedService:
        facts = _facts(epoch, self.config.model.vocab_size, self.plan)
        return SimulatedService(
            self.router,
            self.outbox,
            self.scheduler,
            self.grammars,
            self.supervisor,
            attribution,
            facts,
            self.stop_signal,
            lambda: self.world.now,
            collector=IdleCollector(),
            weights=weights_of(self.scheduler),
            connector=self._connector or NoConnector(),
        )

    def wake(self, *, has_messages: bool = False, has_events: bool = False) -> None:
        """Wake the loop."""
        self._has_messages |= has_messages
        self._has_events |= has_events
        if not self._is_awake:
            self._is_awake = True
            self.after(self._turn_scale * self._rng.random(), self._turn)

    def drain(self) -> None:
        """Act as on SIGTERM."""
        self.stop_signal.count += 1
        self.wake()

    def kill(self) -> None:
        """Act as on SIGKILL; its workers die with it."""
        if not self.is_alive:
            return
        super().kill()
        self.ended_at = self.world.now
        if self._connector is not None:
            close_simulated(self._connector)
        self.group.kill()
        self.on_exit()

    def kill_after(self, num_operations: int) -> None:
        """Die right before this many more messages have been sent, or soon if there are none to send."""
        self._operations_left = num_operations
        self.after(50 * self._turn_scale, lambda: self.kill())

    def operate(self) -> None:
        """Count a message that is about to be sent.

        Raises:
            CoreKilled: it never is.
        """
        if self.scheduler.in_flight and self._is_fatal(self.scheduler.in_flight[-1]):
            self._die_of_poison()
        if self._operations_left is not None:
            if self._operations_left == 0:
                raise CoreKilled
            self._operations_left -= 1

    def _die_of_poison(self) -> None:
        self.has_met_poison = True
        raise CoreKilled

    def _is_fatal(self, record: StepRecord) -> bool:
        return any(CORE_POISON_MARK in request.request_id for request in record.sampling)

    def check_replay(self) -> None:
        """Require that the recorded calls give the same plans again."""
        result = replay(iter([Opened(self.config, self.plan), *self.entries]))
        assert result.is_identical, f"plan {result.num_plans} of the recording differs"

    def _turn(self) -> None:
        self._is_awake = False
        has_messages, self._has_messages = self._has_messages, False
        has_events, self._has_events = self._has_events, False
        try:
            self.loop.run_iteration(has_messages=has_messages, has_events=has_events)
            if not self.service.is_open:
                self.service.announce_shutdown()
                self.has_said_goodbye = not self.service.has_waited_enough
        except CoreKilled:
            self.kill()
            return
        except WorkerFailed as failure:  # the supervisor has given up
            self.service.announce_failure(str(failure))
            self.kill()
            return
        if not self.service.is_open:
            self.kill()
            return
        if self.router.has_messages or (self.group.has_events and self.supervisor.is_ready):
            self.wake(has_messages=self.router.has_messages, has_events=self.group.has_events)
        timeouts = [timeout for timeout in (self.service.timeout_s, self.supervisor.timeout_s) if timeout is not None]
        if timeouts:
            self._set_alarm(self.world.now + min(timeouts) + POLL_GRAIN_S)

    def _make_group(self) -> "SimulatedGroup | RankedGroup":
        self.num_groups += 1
        kind: Any = SimulatedGroup if self.num_ranks == 1 else partial(RankedGroup, num_ranks=self.num_ranks)
        self.group: SimulatedGroup | RankedGroup = kind(
            self.world,
            self._rng,
            self.config,
            self.plan,
            self._step_scale,
            on_event=lambda: self.wake(has_events=True),
            on_operation=self.operate,
            start_s=self._step_scale * self._rng.choice([1, 10, 100]) if self.num_groups > 1 else 0.0,
            make_next=self._make_group,
            files=self._files,
        )
        return self.group

    def _set_alarm(self, time: float) -> None:
        """Wake the loop at this time, unless it is woken earlier and sets the alarm again."""
        if self.world.now < self._alarm <= time:
            return
        self._alarm = time
        self.after(time - self.world.now, lambda: self.wake() if self._alarm == time else None)

    def _scheduler(self, is_observed: bool) -> Scheduler:
        clock = lambda: self.world.now  # noqa: E731
        if not is_observed:
            return Scheduler(self.config, self.plan, clock)
        return ObservedScheduler(self.config, self.plan, clock, [self._observe])

    def _observe(self, scheduler: Scheduler, entry: LogEntry) -> None:
        self.entries.append(entry)
        if isinstance(entry, Planned):
            invariants.check_plan(scheduler, entry.plan)
        elif isinstance(entry, WorkersLost):
            invariants.check_loss(scheduler)
        else:
            invariants.check(scheduler)


def _facts(epoch: int, vocab_size: int, plan: CachePlan) -> EngineFacts:
    return EngineFacts(
        epoch=epoch,
        model="simulated",
        served_model_names=["simulated"],
        max_model_len=plan.max_model_len,
        vocab_size=vocab_size,
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        max_num_seqs=0,
        max_logprobs=-1,
        dtype="none",
        device="simulated",
        config=b"",
    )
