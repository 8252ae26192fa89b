"""What a frontend asks of a new core: everything that is owed, once, in order, with what has been delivered."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from octavo.frontend.recovery.ledger import Ledger
from octavo.protocol.events import Failed, FailureKind, Finished, FinishReason, RequestEvent, Tokens
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit


def submission(name: str, max_tokens: int = 4) -> Submit:
    return Submit(name, [1, 2, 3], SamplingSpec(max_tokens=max_tokens, seed=0))


def test_a_resubmission_carries_what_was_delivered() -> None:
    ledger = Ledger()
    ledger.add(submission("a"), is_sent=True)
    ledger.deliver(Tokens("a", [7, 8], num_cached_tokens=2))
    ledger.lose_core()
    assert ledger.blame("killed") is None
    (again,) = ledger.take_unsent()
    assert again.prompt_token_ids == [1, 2, 3], "never glued to the prompt"
    assert again.resume_output_token_ids == [7, 8]
    assert again.is_continued
    assert ledger.take_unsent() == []


def test_what_is_new_is_sent_as_it_is() -> None:
    ledger = Ledger()
    ledger.add(submission("a"), is_sent=False)
    assert ledger.num_new == 1
    assert ledger.take_unsent() == [submission("a")]
    assert ledger.num_new == 0


def test_the_order_of_arrival_is_kept() -> None:
    ledger = Ledger()
    for name in "abc":
        ledger.add(submission(name), is_sent=True)
    ledger.lose_core()
    ledger.add(submission("d"), is_sent=False)
    assert [submit.request_id for submit in ledger.take_unsent()] == ["a", "b", "c", "d"]


def test_an_abort_during_the_outage_is_honoured() -> None:
    ledger = Ledger()
    ledger.add(submission("a"), is_sent=True)
    ledger.lose_core()
    ledger.add(submission("b"), is_sent=False)
    assert not ledger.remove("a"), "no core knows it"
    assert not ledger.remove("b")
    assert ledger.take_unsent() == []
    assert ledger.num_new == 0
    assert ledger.deliver(Tokens("a", [7])) is None


def test_usage_is_that_of_the_first_core() -> None:
    ledger = Ledger()
    ledger.add(submission("a"), is_sent=True)
    ledger.deliver(Tokens("a", [7], num_cached_tokens=2))
    ledger.lose_core()
    ledger.take_unsent()
    assert ledger.deliver(Tokens("a", [8])) == Tokens("a", [8], num_cached_tokens=2)
    end = ledger.deliver(Finished("a", FinishReason.LENGTH, num_preemptions=1))
    assert end == Finished("a", FinishReason.LENGTH, num_cached_tokens=2, num_preemptions=2)
    assert len(ledger) == 0


def test_one_that_started_anew_tells_of_the_new_cache() -> None:
    ledger = Ledger()
    ledger.add(submission("a"), is_sent=True)
    ledger.lose_core()
    ledger.take_unsent()
    assert ledger.deliver(Tokens("a", [8], num_cached_tokens=1)) == Tokens("a", [8], num_cached_tokens=1)


def test_an_abort_during_the_outage_ends_all_suspicion() -> None:
    ledger = Ledger()
    for _ in range(5):
        ledger.add(submission("a"), is_sent=True)
        ledger.lose_core()
        ledger.remove("a")
        assert ledger.blame("killed") is None
    ledger.add(submission("a"), is_sent=True)
    ledger.lose_core()
    assert ledger.blame("killed") is None, "it is another request of that name"


@dataclass
class World:
    """A core over a ledger: it computes a token of each request in every step and dies of poison or by accident."""

    lengths: list[int]
    poisons: dict[int, int]
    """By request: the token whose computation kills."""
    accidents: set[int]
    ledger: Ledger = field(default_factory=Ledger)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, RequestEvent] = field(default_factory=dict)
    num_deaths: int = 0
    core: dict[str, Submit] = field(default_factory=dict)
    progress: dict[str, int] = field(default_factory=dict)

    def run(self) -> None:
        for index, length in enumerate(self.lengths):
            self.outputs[str(index)] = []
            self.ledger.add(submission(str(index), length), is_sent=False)
        turn = 0
        while len(self.ledger):
            turn += 1
            assert turn < 5_000, "no end"
            for submit in self.ledger.take_unsent():
                self.core[submit.request_id] = submit
                self.progress[submit.request_id] = len(submit.resume_output_token_ids)
                assert submit.resume_output_token_ids == self.outputs[submit.request_id]
            assert self.core, "somebody may run"
            fatal = any(self.progress[name] == self.poisons.get(int(name), -1) for name in self.core)
            if fatal or turn in self.accidents:
                self._die()
            else:
                self._step()

    def _die(self) -> None:
        self.num_deaths += 1
        self.core.clear()
        self.ledger.lose_core()
        if failed := self.ledger.blame("killed"):
            self.ends[failed.request_id] = failed

    def _step(self) -> None:
        for name, submit in list(self.core.items()):
            token = self.progress[name]
            self.progress[name] += 1
            shown = self.ledger.deliver(Tokens(name, [token]))
            assert isinstance(shown, Tokens)
            self.outputs[name] += shown.token_ids
            if self.progress[name] == submit.sampling.max_tokens:
                del self.core[name]
                end = self.ledger.deliver(Finished(name, FinishReason.LENGTH))
                assert end is not None
                self.ends[name] = end


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    poisons=st.dictionaries(st.integers(0, 11), st.integers(0, 11), max_size=3),
    accidents=st.sets(st.integers(1, 60), max_size=2),
)
def test_the_guilty_alone_fail_and_all_others_finish(
    lengths: list[int], poisons: dict[int, int], accidents: set[int]
) -> None:
    world = World(lengths, poisons, accidents)
    world.run()
    guilty = {str(index) for index, place in poisons.items() if index < len(lengths) and place < lengths[index]}
    for index, length in enumerate(lengths):
        end = world.ends[str(index)]
        if str(index) in guilty:
            assert isinstance(end, Failed) and end.kind is FailureKind.INTERNAL
        elif not accidents:
            assert isinstance(end, Finished)
            assert world.outputs[str(index)] == list(range(length))
    assert accidents or world.num_deaths <= 12 * (len(guilty) + 1)
