"""Whole engines on a virtual clock: short runs of many seeds, seeds that once failed, and bugs that must be found."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import msgspec
import pytest
from client_events import by_request
from pairwise import short_first
from simulation.campaign import Failure, Order, Totals, attempt, orders, shrink
from simulation.ranks import SimulatedRank
from simulation.run import Report, run_scenario
from simulation.scenario import FaultKind, draw_scenario
from simulation.variants import VARIANTS
from simulation.worker import SimulatedWorker

from octavo.core_proc.cache.pool import BlockPool
from octavo.core_proc.cache.prefix import PrefixCache
from octavo.core_proc.encoder_schedule import EncoderSchedule
from octavo.core_proc.outbox import Outbox
from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.delta import StepBuilder
from octavo.core_proc.scheduler.prefill import Prefill
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.frontend.link import CoreLink
from octavo.frontend.recovery.in_flight import InFlightRequest, InFlightRequests
from octavo.frontend.request_stream import RequestStream
from octavo.protocol.codec import Frame
from octavo.protocol.config.kv_transfer import ResolvedKVConnector
from octavo.protocol.ids import pack_ids
from octavo.protocol.prompt_embeds import PromptEmbeds, StepEmbedsBuilder
from octavo.protocol.requests import Submit
from octavo.protocol.steps import StepPlan, StepResult, TokenMask

NUM_REQUESTS = 60
NUM_KILLS = 6


def run(order: Order) -> Report:
    """Run a scenario; a failure says how to run it again."""
    outcome = attempt(order)
    if isinstance(outcome, Failure):
        pytest.fail(f"{outcome.details}\nreplay: {order.command}", pytrace=False)
    return outcome


@pytest.mark.parametrize("seed", short_first(range(24), 8))
def test_every_request_ends_once_and_right(seed: int) -> None:
    run(Order(seed, NUM_REQUESTS, NUM_KILLS))


@pytest.mark.parametrize("seed", short_first(range(4), 2))
@pytest.mark.parametrize(("num_ranks", "num_engines"), [(2, 1), (4, 1), (1, 3), (2, 3)])
def test_ranks_and_engines_lose_nothing(seed: int, num_ranks: int, num_engines: int) -> None:
    run(Order(seed, NUM_REQUESTS, NUM_KILLS, num_ranks=num_ranks, num_engines=num_engines))


@pytest.mark.long
@pytest.mark.parametrize(("num_ranks", "num_engines"), [(2, 1), (4, 1), (1, 3), (2, 3)])
def test_fifty_thousand_requests_on_ranks_and_engines(num_ranks: int, num_engines: int) -> None:
    for order in orders(20_000, 50_000, 2_500, num_ranks, num_engines):
        run(order)


@pytest.mark.long
def test_a_hundred_thousand_requests() -> None:
    for order in orders(seed=10_000, num_requests=100_000, num_kills=4_000):
        run(order)


def test_the_same_seed_gives_the_same_run() -> None:
    order = Order(5, NUM_REQUESTS, NUM_KILLS)
    assert run(order) == run(replace(order, is_observed=False)) == run(order)
    assert run(order) != run(replace(order, seed=6))


def test_the_runs_reach_what_they_are_for() -> None:
    """Runs without preemptions, shared blocks, deaths and guilty requests would prove little."""
    totals = Totals()
    for seed in range(100, 140):
        totals.add(run(Order(seed, NUM_REQUESTS, NUM_KILLS, is_observed=False)))
    counts = totals.counts
    assert counts["num_answers"] > 1000
    assert counts["num_left"] > 100
    assert counts["num_overloaded"] > 50
    assert counts["num_preemptions"] > 20
    assert counts["num_cached_tokens"] > 1000
    assert counts["num_loaded_tokens"] > 100
    assert counts["num_guilty"] > 0
    assert counts["num_core_lives"] > totals.num_runs + 10
    assert counts["num_worker_lives"] > counts["num_core_lives"] + 10
    assert set(totals.faults) == set(FaultKind.__args__)


@pytest.mark.parametrize("seed", [616, 1216, 1265])
def test_contents_are_loaded_through_connectors(seed: int) -> None:
    """In few of the drawn runs a request lacks what others have: in these, many do."""
    scenario = draw_scenario(seed, 60, 12)
    connector = ResolvedKVConnector(name="Simulated", module_path="", role="kv_both")
    engine = {**scenario.engine, "kv_offloading_path": "", "kv_connector": connector}
    report = run_scenario(replace(scenario, engine=engine), is_observed=True)
    assert report.num_loaded_tokens > 20


@pytest.mark.parametrize(("seed", "num_ranks", "path"), [(2002, 1, "/files"), (2061, 2, "/files"), (2128, 2, "")])
def test_states_are_loaded(seed: int, num_ranks: int, path: str) -> None:
    """As above, with recurrent states from files or through a connector: some come late, some never."""
    scenario = draw_scenario(seed, 60, 12, num_ranks)
    assert any(group.kind == "state" for group in scenario.groups)
    connector = None if path else ResolvedKVConnector(name="Simulated", module_path="", role="kv_both")
    changes = {"kv_offloading_path": path, "kv_connector": connector, "enable_prefix_caching": True}
    engine = {**scenario.engine, **changes}
    report = run_scenario(replace(scenario, engine=engine), is_observed=True)
    assert report.num_loaded_tokens > 20


def test_requests_move_between_engines() -> None:
    totals = Totals()
    for seed in range(100, 110):
        totals.add(run(Order(seed, NUM_REQUESTS, NUM_KILLS, is_observed=False, num_engines=3)))
    assert totals.counts["num_moved"] > 20
    assert totals.counts["num_answers"] > 300


def test_plans_of_several_steps_are_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted, execute = [], SimulatedWorker.execute

    def execute_some(worker: SimulatedWorker, plan: StepPlan, masks: Sequence[TokenMask] = ()) -> StepResult:
        interrupted.append(worker.max_steps < plan.num_steps)
        return execute(worker, plan, masks)

    monkeypatch.setattr(SimulatedWorker, "execute", execute_some)
    for seed in (3038, 3049, 3061):
        run(Order(seed, NUM_REQUESTS, NUM_KILLS, variant="long-plans"))
    assert sum(interrupted) > 50


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ten_thousand_requests_of_each_variant(variant: str, num_ranks: int) -> None:
    for order in orders(30_000, 10_000, 1_000, num_ranks, variant=variant):
        run(order)


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(Order(162, 100, 12), id="a request was blamed for connections that broke"),
        pytest.param(Order(193, 100, 12), id="the same with two frontends"),
        pytest.param(Order(21, 100, 8), id="a frontend that was given up waited for ever"),
        pytest.param(Order(82, 100, 8), id="the same after a worker's death"),
        pytest.param(Order(68, 100, 8), id="a drain did not continue what it had accepted"),
        pytest.param(Order(303, 60, 6), id="a second load leaked the blocks of the first one"),
        pytest.param(
            Order(48, 60, 6, num_ranks=2, variant="step-limits"), id="a whole prompt exceeded its share of a step"
        ),
        pytest.param(Order(635, 60, 12), id="drafts needed more blocks of a window than a chunk of a prompt"),
        pytest.param(
            Order(1000150, 500, 20), id="a drained core did not wait for the return of a frontend it had given up"
        ),
    ],
)
def test_seeds_that_failed_once(order: Order) -> None:
    run(order)


def forget_a_block(pool: BlockPool, block_ids: list[int]) -> None:
    """A release that leaves the first block out."""
    release(pool, block_ids[1:])


def name_too_much(cache: PrefixCache, request: Request) -> None:
    """Blocks named as soon as their request has them, before they are computed."""
    request.num_computed_tokens, before = len(request.token_ids), request.num_computed_tokens
    cache_full_blocks(cache, request)
    request.num_computed_tokens = before


def keep_the_contents(scheduler: Scheduler) -> None:
    """Lost workers whose blocks are still to be found in the prefix cache."""
    forget, scheduler.cache.pool.reset_contents = scheduler.cache.pool.reset_contents, lambda: True
    lose_workers(scheduler)
    scheduler.cache.pool.reset_contents = forget


def send_the_last_alone(outbox: Outbox, events: Iterable[ClientEvent]) -> None:
    """A step's events without the first, where there are several."""
    each = by_request(events)
    put(outbox, each[1:] or each)


def resume_without_outputs(in_flight: InFlightRequests, max_count: int) -> list[Submit]:
    """Requests that start again instead of going on."""
    return [
        msgspec.structs.replace(submit, resume_output_token_ids=pack_ids([]))
        for submit in take_unsent(in_flight, max_count)
    ]


def adopt_without_outputs(in_flight: InFlightRequests, entry: InFlightRequest, num_new_tokens: int) -> Submit | None:
    """Requests that start again on another engine instead of going on."""
    submit = adopt(in_flight, entry, num_new_tokens)
    return submit and entry.submit


def release_and_forget_one(link: CoreLink, max_count: int) -> list[tuple[InFlightRequest, RequestStream]]:
    """Requests that leave a dead engine, without the last of them."""
    return release_requests(link, max_count)[:-1]


def send_the_first_rows(builder: StepEmbedsBuilder, slot: int, embeds: PromptEmbeds, start: int, end: int) -> None:
    """Chunks that come with the rows from the start of their prompt."""
    add_rows(builder, slot, embeds, 0, end - start)


def keep_the_media(encoder: EncoderSchedule, *, tells_workers: bool) -> None:
    """Encoded items that count as kept after the worker that kept them has died."""


def split_the_items(prefill: Prefill, builder: StepBuilder, request: Request, num_tokens: int) -> int:
    """Chunks that end within an item whose rows attend to each other."""
    return num_tokens


def unpin_what_is_attended(encoder: EncoderSchedule, request: Request) -> None:
    """Items that make room for others while requests attend to them."""
    start_attending(encoder, request)
    encoder._pinned.clear()


add_rows = StepEmbedsBuilder.add
start_attending = EncoderSchedule.start
adopt, release_requests = InFlightRequests.adopt, CoreLink.release
release, cache_full_blocks, lose_workers = BlockPool.release, PrefixCache.cache_full_blocks, Scheduler.lose_workers
put, take_unsent = Outbox.put, InFlightRequests.take_unsent


@pytest.fixture
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plant a bug for the length of a test."""
    owner, name, bug = request.param
    monkeypatch.setattr(owner, name, bug)
    yield


def first_failure(is_right_kind: Callable[[Failure], bool], num_ranks: int = 1, num_engines: int = 1) -> Failure:
    """Return the first of a few runs that finds something."""
    for seed in range(60):
        order = Order(seed, NUM_REQUESTS, NUM_KILLS, is_observed=False, num_ranks=num_ranks, num_engines=num_engines)
        outcome = attempt(order)
        if isinstance(outcome, Failure) and is_right_kind(outcome):
            return outcome
    pytest.fail("nobody has noticed")


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param((BlockPool, "release", forget_a_block), id="blocks leak"),
        pytest.param((PrefixCache, "cache_full_blocks", name_too_much), id="blocks are shared too early"),
        pytest.param((Scheduler, "lose_workers", keep_the_contents), id="lost blocks are shared"),
        pytest.param((Outbox, "put", send_the_last_alone), id="events are lost"),
        pytest.param((InFlightRequests, "take_unsent", resume_without_outputs), id="tokens come twice"),
        pytest.param((StepEmbedsBuilder, "add", send_the_first_rows), id="a chunk has the rows of another"),
        pytest.param((EncoderSchedule, "forget", keep_the_media), id="lost media are not encoded again"),
        pytest.param((Prefill, "_with_whole_spans", split_the_items), id="a chunk ends within an item"),
        pytest.param((EncoderSchedule, "start", unpin_what_is_attended), id="an attended item is evicted"),
        pytest.param((InFlightRequests, "lose_core", lambda in_flight: None), id="nothing is asked again"),
    ],
    indirect=True,
)
def test_a_planted_bug_is_found_without_the_invariants(planted: None) -> None:
    assert first_failure(lambda failure: True)


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param((InFlightRequests, "adopt", adopt_without_outputs), id="tokens come twice"),
        pytest.param((CoreLink, "release", release_and_forget_one), id="a request is lost on its way"),
    ],
    indirect=True,
)
def test_a_planted_bug_of_moves_is_found(planted: None) -> None:
    assert first_failure(lambda failure: True, num_engines=3)


def test_a_step_too_many_in_flight_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    may_plan = Scheduler.may_plan
    monkeypatch.setattr(Scheduler, "may_plan", lambda scheduler, depth: may_plan(scheduler, depth + 1))
    assert "workers have buffers for" in str(first_failure(lambda failure: True, num_ranks=2))


def test_a_rank_that_misses_a_command_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = SimulatedRank.receive

    def receive_most(rank: SimulatedRank, frames: list[Frame]) -> None:
        if not (rank.number == 1 and rank.num_received == 5):
            receive(rank, frames)
        rank.num_received += 1

    monkeypatch.setattr(SimulatedRank, "num_received", 0, raising=False)
    monkeypatch.setattr(SimulatedRank, "receive", receive_most)
    assert first_failure(lambda failure: True, num_ranks=2)


@pytest.mark.parametrize("planted", [(InFlightRequests, "take_unsent", resume_without_outputs)], indirect=True)
def test_a_failing_run_is_made_smaller(planted: None) -> None:
    failure = first_failure(lambda failure: failure.kind == "WrongAnswer")
    smallest = shrink(failure, timeout_s=200.0)
    assert smallest.kind == failure.kind
    assert smallest.order.asks is not None and 0 < len(smallest.order.asks) <= 10  # of 60
    assert smallest.order.faults is not None and len(smallest.order.faults) <= 2  # some requests kill a core themselves
    again = attempt(smallest.order)
    assert isinstance(again, Failure) and again.message == smallest.message
    assert f"--only-requests {smallest.order.asks[0]}" in smallest.order.command
