"""What a frontend asks of a new core: everything that is owed, once, in order, with what has been delivered."""

from octavo.frontend.recovery.ledger import Ledger
from octavo.protocol.events import Finished, FinishReason, Tokens
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit


def submission(name: str, max_tokens: int = 4) -> Submit:
    return Submit(name, [1, 2, 3], SamplingSpec(max_tokens=max_tokens, seed=0))


def test_a_resubmission_carries_what_was_delivered() -> None:
    ledger = Ledger()
    ledger.add(submission("a"), is_sent=True)
    ledger.deliver(Tokens("a", [7, 8], num_cached_tokens=2))
    ledger.lose_core()
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
