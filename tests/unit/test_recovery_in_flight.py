"""What a frontend resubmits to a new core: every live request, once, in order, with its delivered tokens."""

from octavo.frontend.recovery.in_flight import InFlightRequests
from octavo.protocol.events import Finished, FinishReason, Tokens
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit


def submission(name: str, max_tokens: int = 4) -> Submit:
    return Submit(name, [1, 2, 3], SamplingSpec(max_tokens=max_tokens, seed=0))


def test_a_resubmission_carries_what_was_delivered() -> None:
    in_flight = InFlightRequests()
    in_flight.add(submission("a"), is_sent=True)
    in_flight.deliver(Tokens("a", [7, 8], num_cached_tokens=2))
    in_flight.lose_core()
    (again,) = in_flight.take_unsent(9)
    assert again.prompt_token_ids == [1, 2, 3], "never glued to the prompt"
    assert again.resume_output_token_ids == pack_ids([7, 8])
    assert again.is_continued
    assert in_flight.take_unsent(9) == []


def test_a_new_request_is_sent_unchanged() -> None:
    in_flight = InFlightRequests()
    in_flight.add(submission("a"), is_sent=False)
    assert in_flight.num_new == 1
    assert in_flight.take_unsent(9) == [submission("a")]
    assert in_flight.num_new == 0


def test_the_order_of_arrival_is_kept() -> None:
    in_flight = InFlightRequests()
    for name in "abc":
        in_flight.add(submission(name), is_sent=True)
    in_flight.lose_core()
    in_flight.add(submission("d"), is_sent=False)
    assert [submit.request_id for submit in in_flight.take_unsent(9)] == ["a", "b", "c", "d"]


def test_an_abort_during_the_outage_is_honoured() -> None:
    in_flight = InFlightRequests()
    in_flight.add(submission("a"), is_sent=True)
    in_flight.lose_core()
    in_flight.add(submission("b"), is_sent=False)
    assert not in_flight.remove("a"), "no core knows it"
    assert not in_flight.remove("b")
    assert in_flight.take_unsent(9) == []
    assert in_flight.num_new == 0
    assert in_flight.deliver(Tokens("a", [7])) is None


def test_usage_is_that_of_the_first_core() -> None:
    in_flight = InFlightRequests()
    in_flight.add(submission("a"), is_sent=True)
    in_flight.deliver(Tokens("a", [7], num_cached_tokens=2))
    in_flight.lose_core()
    in_flight.take_unsent(9)
    assert in_flight.deliver(Tokens("a", [8])) == Tokens("a", [8], num_cached_tokens=2)
    end = in_flight.deliver(Finished("a", FinishReason.LENGTH, num_preemptions=1))
    assert end == Finished("a", FinishReason.LENGTH, num_cached_tokens=2, num_preemptions=2)
    assert len(in_flight) == 0


def test_a_restarted_request_reports_hits_in_the_new_cache() -> None:
    in_flight = InFlightRequests()
    in_flight.add(submission("a"), is_sent=True)
    in_flight.lose_core()
    in_flight.take_unsent(9)
    assert in_flight.deliver(Tokens("a", [8], num_cached_tokens=1)) == Tokens("a", [8], num_cached_tokens=1)


def test_an_id_that_comes_again_waits_for_the_end_of_the_aborted_request() -> None:
    """Otherwise the last events of the first request would be taken for those of the second."""
    in_flight = InFlightRequests()
    in_flight.add(submission("a"), is_sent=True)
    assert in_flight.abort("a")
    assert in_flight.is_ending("a")
    in_flight.add(submission("a", max_tokens=9), is_sent=False)
    assert in_flight.num_new == 1
    assert not in_flight.has_unsent, "others need not wait"
    assert in_flight.deliver(Tokens("a", [7])) is None
    assert in_flight.take_held("a") is None
    assert in_flight.deliver(Finished("a", FinishReason.ABORT)) is None
    assert in_flight.take_held("a") == submission("a", max_tokens=9)
    assert in_flight.num_new == 0
    assert in_flight.deliver(Tokens("a", [8])) == Tokens("a", [8])


def test_a_request_that_returns_waits_for_the_end_of_its_abort() -> None:
    """It moved from a live engine to another one, which died."""
    first, second = InFlightRequests(), InFlightRequests()
    first.add(submission("a"), is_sent=True)
    first.deliver(Tokens("a", [7]))
    (entry,) = first.release(9, after_crash=False)
    assert second.adopt(entry, 0) is not None
    second.lose_core()
    (entry,) = second.release(9)
    assert first.adopt(entry, 0) is None
    assert first.deliver(Finished("a", FinishReason.ABORT)) is None
    held = first.take_held("a")
    assert held is not None and held.resume_output_token_ids == pack_ids([7])


def test_a_new_core_ends_nothing_for_its_predecessor() -> None:
    in_flight = InFlightRequests()
    in_flight.add(submission("a"), is_sent=True)
    in_flight.abort("a")
    in_flight.add(submission("a"), is_sent=False)
    in_flight.lose_core()
    assert not in_flight.is_ending("a")
    assert in_flight.take_unsent(9) == [submission("a")]
