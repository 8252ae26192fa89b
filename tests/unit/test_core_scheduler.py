"""Scheduling scenarios, each one small enough to follow by hand."""

import pytest
from core_fakes import FakeEngine, alone

from octavo.core_proc.scheduler.queue_report import explain_waiting
from octavo.protocol.errors import ProtocolError
from octavo.protocol.events import Finished, FinishReason
from octavo.protocol.steps import StepResult


def prompt(length: int, salt: int = 1) -> list[int]:
    """Return a prompt that differs from those of other salts in its first block."""
    return [(salt * 7 + index * index) % 49 + 1 for index in range(length)]


def reason(output) -> FinishReason:
    assert isinstance(output.end, Finished)
    return output.end.reason


def test_all_new_requests_start_in_one_step_within_the_budget():
    engine = FakeEngine(max_num_seqs=10, max_num_batched_tokens=40)
    for index in range(10):
        engine.submit(str(index), prompt(4, index), max_tokens=3)
    plan = engine.plan()
    assert len(plan.admitted) == 10
    assert sum(part.num_tokens for part in plan.scheduled) == 40
    engine.run()
    assert all(reason(output) is FinishReason.LENGTH for output in engine.outputs.values())
    assert all(len(output.token_ids) == 3 for output in engine.outputs.values())


def test_a_long_prompt_is_chunked_and_a_second_one_fills_the_step():
    engine = FakeEngine(max_num_batched_tokens=16, async_scheduling=False)
    engine.submit("long", prompt(40), max_tokens=1)
    engine.plan()
    engine.commit()
    engine.plan()
    engine.commit()
    engine.submit("second", prompt(20, 2), max_tokens=1)
    engine.run()
    assert engine.scheduled_tokens() == [[16], [16], [8, 8], [12]]


def test_prefilling_requests_share_the_budget_and_the_rest_goes_around():
    engine = FakeEngine(max_num_batched_tokens=32)
    engine.submit("long", prompt(60), max_tokens=1)
    engine.submit("short", prompt(5, 2), max_tokens=1)
    engine.plan()
    assert engine.scheduled_tokens() == [[27, 5]]


def test_decodes_come_first():
    engine = FakeEngine(max_num_batched_tokens=8, async_scheduling=False)
    engine.submit("decoding", prompt(4), max_tokens=8)
    engine.turn()
    engine.turn()
    engine.submit("long", prompt(30, 2), max_tokens=1)
    engine.plan()
    assert engine.scheduled_tokens()[-1] == [1, 7]


def test_short_prompts_are_computed_whole_and_in_order():
    engine = FakeEngine(max_num_batched_tokens=32, async_scheduling=False)
    for index in range(5):
        engine.submit(str(index), prompt(12, index), max_tokens=1)
    engine.run()
    assert engine.scheduled_tokens() == [[12, 12, 8], [4, 12, 12]]


def test_a_full_step_takes_no_further_prompt():
    engine = FakeEngine(max_num_batched_tokens=32, full_step_tokens=8, async_scheduling=False)
    for index, length in enumerate([12, 5, 3, 1, 20]):
        engine.submit(str(index), prompt(length, index), max_tokens=1)
    engine.run()
    assert engine.scheduled_tokens() == [[12], [5, 3], [1], [20]]


def test_a_long_prompt_goes_on_beside_any_number_of_short_ones():
    engine = FakeEngine(max_num_batched_tokens=16, full_step_tokens=8, async_scheduling=False)
    engine.submit("long", prompt(60), max_tokens=1)
    for index in range(20):
        engine.submit(str(index), prompt(8, 2 + index), max_tokens=1)
        engine.turn()
        engine.turn()
        if engine.outputs["long"].end:
            break
    assert reason(engine.outputs["long"]) is FinishReason.LENGTH
    assert 2 < index < 15
    ended = [name for name, output in engine.outputs.items() if output.end and name != "long"]
    assert len(ended) > index - 2, "the short ones do not wait for the long one"


def test_decodes_give_way_to_first_tokens_but_not_for_long():
    engine = FakeEngine(
        max_num_batched_tokens=16, full_step_tokens=8, decode_interval_tokens=24, async_scheduling=False
    )
    engine.submit("decoding", prompt(4), max_tokens=9)
    engine.turn()
    engine.turn()
    for index in range(4):
        engine.submit(str(index), prompt(8, 2 + index), max_tokens=1)
    engine.run()
    assert engine.scheduled_tokens() == [[4], [8], [8], [8], [1, 8], *[[1]] * 7]


def test_decodes_do_not_give_way_to_a_prompt_that_no_step_can_finish():
    engine = FakeEngine(max_num_batched_tokens=16, decode_interval_tokens=100, async_scheduling=False)
    engine.submit("decoding", prompt(4), max_tokens=4)
    engine.turn()
    engine.turn()
    engine.submit("long", prompt(40, 2), max_tokens=1)
    engine.plan()
    assert engine.scheduled_tokens()[-1][0] == 1


def test_decodes_give_way_to_nobody_who_cannot_start():
    engine = FakeEngine(max_num_seqs=1, decode_interval_tokens=100, async_scheduling=False)
    engine.submit("decoding", prompt(4), max_tokens=3)
    engine.submit("waiting", prompt(4, 2), max_tokens=1)
    engine.run()
    assert engine.scheduled_tokens() == [[4], [1], [1], [4]]


@pytest.mark.parametrize(("full_step_tokens", "num_ahead"), [(0, 2), (9, 2), (8, 1)])
def test_nothing_is_planned_ahead_of_a_full_step(full_step_tokens, num_ahead):
    engine = FakeEngine(full_step_tokens=full_step_tokens)
    engine.submit("one", prompt(8), max_tokens=5)
    while engine.scheduler.may_plan(2):
        assert engine.plan()
    assert engine.scheduler.num_in_flight == num_ahead


def test_long_prefill_token_threshold_caps_every_long_prompt():
    engine = FakeEngine(max_num_batched_tokens=32, long_prefill_token_threshold=6)
    for index in range(3):
        engine.submit(str(index), prompt(15, index), max_tokens=1)
    engine.run()
    assert engine.scheduled_tokens()[0] == [6, 6, 6]
    assert max(max(counts) for counts in engine.scheduled_tokens()) == 6


def stopping_token(tokens: list[int], at_least: int = 1) -> tuple[int, int]:
    """Return the first token, at index `at_least` or later, that does not occur before, and its index."""
    return next((t, i) for i, t in enumerate(tokens) if i >= at_least and t not in tokens[:i])


@pytest.mark.parametrize("is_async", [False, True])
def test_stop_by_eos_stop_token_and_length(is_async):
    free = alone(prompt(6), max_tokens=12).token_ids
    token, index = stopping_token(free, 3)
    engine = FakeEngine(async_scheduling=is_async)
    eos = engine.submit("eos", prompt(6), 12, eos_token_ids=(token,))
    stop = engine.submit("stop", prompt(6), 12, stop_token_ids=(token,))
    ignored = engine.submit("ignored", prompt(6), 12)
    engine.run()
    assert eos.token_ids == stop.token_ids == free[: index + 1]
    assert (reason(eos), eos.end.stop_token_id) == (FinishReason.STOP, None)
    assert (reason(stop), stop.end.stop_token_id) == (FinishReason.STOP, token)
    assert ignored.token_ids == free
    assert reason(ignored) is FinishReason.LENGTH


def test_min_tokens_holds_back_a_stop():
    token, _ = stopping_token(alone(prompt(6), max_tokens=12).token_ids, 0)
    engine = FakeEngine()
    output = engine.submit("r", prompt(6), 12, eos_token_ids=(token,), min_tokens=5)
    engine.run()
    assert len(output.token_ids) >= 5
    assert token not in output.token_ids[:5]


def test_max_model_len_ends_a_request():
    engine = FakeEngine(max_model_len=10)
    output = engine.submit("r", prompt(7), max_tokens=100)
    engine.run()
    assert len(output.token_ids) == 3
    assert reason(output) is FinishReason.LENGTH


@pytest.mark.parametrize("is_async", [False, True])
def test_out_of_blocks_preempts_the_newest_and_it_replays(is_async):
    engine = FakeEngine(num_blocks=9, async_scheduling=is_async, max_model_len=36)
    outputs = [engine.submit(str(index), prompt(8, index), max_tokens=20) for index in range(3)]
    engine.run()
    assert [output.end.num_preemptions > 0 for output in outputs] == [False, True, True]
    assert [output.token_ids for output in outputs] == [alone(prompt(8, i), 20).token_ids for i in range(3)]
    assert engine.scheduler.counters.num_preemptions == sum(output.end.num_preemptions for output in outputs)


def test_a_preempted_request_waits_at_the_head_of_the_queue():
    engine = FakeEngine(num_blocks=6, max_num_seqs=2, async_scheduling=False, max_model_len=24)
    for index in range(3):
        engine.submit(str(index), prompt(8, index), max_tokens=10)
    while not engine.scheduler.counters.num_preemptions:
        engine.turn()
    assert [request.request_id for request in engine.scheduler.waiting] == ["1", "2"]
    assert engine.scheduler.stats().waiting_reason == "blocks"
    needed, free = -(-engine.scheduler.waiting.first.num_tokens // 4), engine.scheduler.cache.pool.num_free
    assert f"it needs {needed} blocks, {free} of 6 are free" in explain_waiting(engine.scheduler, 0.0)


def test_priority_decides_who_is_admitted_and_who_is_preempted():
    engine = FakeEngine(num_blocks=6, scheduling_policy="priority", async_scheduling=False, max_model_len=24)
    low = engine.submit("low", prompt(8, 1), max_tokens=12, priority=5)
    high = engine.submit("high", prompt(8, 2), max_tokens=12, priority=1)
    engine.plan()
    assert [request.request_id for request in engine.scheduler.running] == ["high", "low"]
    engine.run()
    assert (high.end.num_preemptions, low.end.num_preemptions > 0) == (0, True)


def test_equal_priorities_are_served_in_order_of_arrival():
    engine = FakeEngine(max_num_seqs=1, scheduling_policy="priority", async_scheduling=False)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", 0)):
        engine.submit(name, prompt(4), max_tokens=1, priority=priority)
    engine.run()
    assert [admitted.request_id for plan in engine.plans for admitted in plan.admitted] == ["b", "d", "a", "c"]


def test_fcfs_ignores_priority():
    engine = FakeEngine(max_num_seqs=1)
    engine.submit("first", prompt(4), max_tokens=1, priority=9)
    engine.submit("second", prompt(4), max_tokens=1, priority=0)
    assert engine.plan().admitted[0].request_id == "first"


@pytest.mark.parametrize("num_turns", range(8))
def test_abort_in_every_state_returns_everything_at_once(num_turns):
    engine = FakeEngine(num_blocks=9, max_num_batched_tokens=8, max_model_len=36)
    for index in range(4):
        engine.submit(str(index), prompt(9, index), max_tokens=20)
    for _ in range(num_turns):
        engine.turn()
    seen = {name: list(output.token_ids) for name, output in engine.outputs.items()}
    engine.abort(*engine.outputs, "unknown")
    assert all(reason(output) is FinishReason.ABORT for output in engine.outputs.values())
    pool = engine.scheduler.cache.pool
    assert pool.num_free == pool.num_blocks
    engine.run()
    assert {name: output.token_ids for name, output in engine.outputs.items()} == seen
    engine.abort(*engine.outputs)


def test_abort_of_a_preempted_request_in_flight():
    engine = FakeEngine(num_blocks=6, max_model_len=24)
    outputs = [engine.submit(str(index), prompt(8, index), max_tokens=12) for index in range(2)]
    while not engine.scheduler.counters.num_preemptions:
        engine.turn()
    (victim,) = engine.scheduler.waiting
    assert victim.num_in_flight == 1
    engine.abort("1")
    num_tokens = len(outputs[1].token_ids)
    engine.run()
    assert len(outputs[1].token_ids) == num_tokens
    assert outputs[0].token_ids == alone(prompt(8, 0), 12).token_ids


def test_tokens_in_flight_at_a_preemption_are_delivered_before_it_runs_again():
    engine = FakeEngine(num_blocks=6, max_model_len=24)
    outputs = [engine.submit(str(index), prompt(8, index), max_tokens=12) for index in range(2)]
    while not engine.scheduler.counters.num_preemptions:
        engine.turn()
    num_tokens = len(outputs[1].token_ids)
    (victim,) = engine.scheduler.waiting
    engine.commit()
    assert (victim.num_in_flight, len(outputs[1].token_ids)) == (0, num_tokens + 1)
    engine.run()
    assert outputs[1].token_ids == alone(prompt(8, 1), 12).token_ids


def test_async_ends_by_max_tokens_without_a_wasted_step_and_by_eos_with_one():
    free = alone(prompt(4), max_tokens=6).token_ids
    engine = FakeEngine()
    engine.submit("length", prompt(4), max_tokens=6)
    engine.run()
    assert len(engine.plans) == 6
    token, index = stopping_token(free, 2)
    engine = FakeEngine()
    engine.submit("eos", prompt(4), max_tokens=20, eos_token_ids=(token,))
    engine.run()
    assert len(engine.plans) == index + 2


def test_resumed_outputs_are_not_sent_again():
    whole = alone(prompt(6), max_tokens=10, logprobs=0)
    engine = FakeEngine()
    output = engine.submit("r", prompt(6), 10, logprobs=0, resume_output_token_ids=whole.token_ids[:4])
    engine.run()
    assert output.token_ids == whole.token_ids[4:]
    assert output.logprobs == whole.logprobs[4:]


def test_a_resumed_request_that_was_over_ends_at_once():
    whole = alone(prompt(6), max_tokens=10)
    engine = FakeEngine()
    output = engine.submit("r", prompt(6), 10, resume_output_token_ids=whole.token_ids)
    assert reason(output) is FinishReason.LENGTH
    assert engine.plan() is None


@pytest.mark.parametrize("num_blocks", [64, 9])
def test_prompt_logprobs_come_once_and_whole(num_blocks):
    """With few blocks, the second request is preempted while its chunks are computed."""
    engine = FakeEngine(num_blocks=num_blocks, max_num_batched_tokens=8, max_model_len=36)
    fields = {"prompt_logprobs": 0, "skip_reading_prefix_cache": True}
    outputs = [engine.submit(str(i), prompt(14, i), 12, **fields) for i in range(3)]
    engine.run()
    for index, output in enumerate(outputs):
        expected = alone(prompt(14, index), 12, **fields)
        assert output.prompt_logprobs == expected.prompt_logprobs
        assert len(output.prompt_logprobs) == 14
        assert output.prompt_logprobs[0] is None


def test_a_result_out_of_turn_is_rejected():
    engine = FakeEngine()
    engine.submit("r", prompt(4))
    engine.plan()
    with pytest.raises(ProtocolError, match="result of step 5"):
        engine.scheduler.commit(StepResult(5, [1], [], []))
    with pytest.raises(ProtocolError, match="samples 1 positions"):
        engine.scheduler.commit(StepResult(0, [], [], []))


def test_waiting_reasons():
    engine = FakeEngine(max_num_seqs=1)
    engine.submit("a", prompt(4))
    engine.submit("b", prompt(4))
    assert explain_waiting(engine.scheduler, 0.0) == ""
    engine.plan()
    assert engine.scheduler.stats().waiting_reason == "max_num_seqs"
    told = explain_waiting(engine.scheduler, engine.scheduler.waiting.first.time_queued + 12.0)
    assert told == ("1 requests wait; the first, b, has for 12 s: 1 requests run, which is the limit (--max-num-seqs)")
    engine = FakeEngine(max_num_batched_tokens=6)
    engine.submit("a", prompt(20))
    engine.submit("b", prompt(20, 2))
    engine.plan()
    assert engine.scheduler.stats().waiting_reason == "budget"
    assert "all of the 6 tokens of a step (--max-num-batched-tokens)" in explain_waiting(engine.scheduler, 0.0)


def test_timings_are_in_order():
    engine = FakeEngine()
    output = engine.submit("r", prompt(4))
    engine.run()
    timings = output.end.timings
    assert 0 < timings.queued < timings.scheduled < timings.first_token < timings.finished
