"""Which requests move when an engine dies or leaves, and how several engines look like one."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_client import resolved_config

from octavo.frontend import engine_connection
from octavo.frontend.engine_configs import addresses_of_engines, configs_of_engines
from octavo.frontend.recovery.in_flight import InFlightRequests
from octavo.frontend.recovery.replacement import require_same_bits, require_same_model
from octavo.protocol.errors import ConfigError, NotEnoughMemoryError
from octavo.protocol.events import Tokens
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit
from octavo.protocol.stats import EngineStats, total

BLOCK_SIZE = 16


def submission(name: str) -> Submit:
    return Submit(name, pack_ids([1, 2, 3]), SamplingSpec(max_tokens=4, seed=0))


def test_requests_of_a_dead_engine_continue_elsewhere() -> None:
    dead, other = InFlightRequests(), InFlightRequests()
    dead.add(submission("a"), is_sent=True, num_new_tokens=3)
    dead.add(submission("b"), is_sent=True, num_new_tokens=3)
    assert dead.num_pending_tokens == 6
    dead.deliver(Tokens("a", [7], num_cached_tokens=0))
    assert dead.num_pending_tokens == 3, "a has been computed"
    dead.lose_core()
    dead.add(submission("c"), is_sent=False, num_new_tokens=3)
    moved = dead.release(9)
    assert len(dead) == dead.num_pending_tokens == dead.num_new == 0
    submits = [other.adopt(entry, num_new_tokens=2) for entry in moved]
    assert [submit.request_id for submit in submits] == ["a", "b", "c"]
    assert submits[0].resume_output_token_ids == pack_ids([7])
    assert [submit.is_continued for submit in submits] == [True, True, False]
    assert other.num_pending_tokens == 4, "a has its first token already"
    finished = other.deliver(Tokens("a", [8], num_cached_tokens=5))
    assert finished == Tokens("a", [8], num_cached_tokens=0), "as reported with the first tokens"


def test_a_request_that_was_on_two_dead_engines_stays_with_the_second() -> None:
    """It may be what kills them: the next core of that engine finds out by isolation, and no third engine dies."""
    first, second = InFlightRequests(), InFlightRequests()
    first.add(submission("poison"), is_sent=True)
    first.lose_core()
    (entry,) = first.release(9)
    assert second.adopt(entry, 0) is not None
    second.add(submission("innocent"), is_sent=True)
    second.lose_core()
    assert [entry.submit.request_id for entry in second.release(9)] == ["innocent"]
    (again,) = second.take_unsent(9)
    assert again.request_id == "poison" and again.is_continued


def test_a_request_that_moved_by_request_is_no_suspect_when_its_next_engine_dies() -> None:
    first, second, third = InFlightRequests(), InFlightRequests(), InFlightRequests()
    first.add(submission("a"), is_sent=True)
    first.deliver(Tokens("a", [7], num_cached_tokens=0))
    (entry,) = first.release(9, after_crash=False)
    submit = second.adopt(entry, 0)
    assert submit is not None and submit.resume_output_token_ids == pack_ids([7]) and submit.is_continued
    second.lose_core()
    (entry,) = second.release(9)
    assert third.adopt(entry, 0) is not None
    third.lose_core()
    assert not third.release(9), "two engines died with it"


def test_each_engine_records_in_a_file_of_its_own() -> None:
    config = resolved_config(data_parallel_size=3, record_steps="/tmp/steps")
    configs = configs_of_engines(config)
    assert [one.engine_index for one in configs] == [one.engine_place for one in configs] == [0, 1, 2]
    assert [one.record_steps for one in configs] == ["/tmp/steps", "/tmp/steps.engine1", "/tmp/steps.engine2"]


@pytest.mark.parametrize(("num_engines", "message"), [(1, "worker 1: no"), (2, "engine 1: worker 1: no")])
def test_a_failed_start_names_the_engine_of_several(
    num_engines: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def follow(spawned: Any, on_progress: object) -> None:
        if spawned.config.engine_index == num_engines - 1:
            raise NotEnoughMemoryError("worker 1: no", phase="loading weights", hint="buy some")
        await asyncio.Event().wait()

    monkeypatch.setattr(engine_connection, "follow_engine", follow)
    configs = configs_of_engines(resolved_config(data_parallel_size=num_engines))
    spawned = [SimpleNamespace(config=config) for config in configs]
    with pytest.raises(NotEnoughMemoryError) as raised:
        asyncio.run(engine_connection.follow_engines(cast(Any, spawned), None))
    assert (raised.value.message, raised.value.hint, raised.value.phase) == (message, "buy some", "loading weights")


def test_each_engine_has_an_address_of_its_own() -> None:
    assert addresses_of_engines("tcp://0.0.0.0:5555", 2) == ["tcp://0.0.0.0:5555", "tcp://0.0.0.0:5556"]
    assert addresses_of_engines("ipc:///run/x", 3) == ["ipc:///run/x", "ipc:///run/x.1", "ipc:///run/x.2"]
    assert addresses_of_engines("tcp://127.0.0.1:*", 1) == ["tcp://127.0.0.1:*"]
    with pytest.raises(ConfigError, match="names no port"):
        addresses_of_engines("tcp://127.0.0.1:*", 2)


def test_engines_that_compute_other_bits_are_not_joined() -> None:
    require_same_bits({"ipc:///a": "x", "ipc:///b": "x"})
    with pytest.raises(ConfigError, match=r"ipc:///b does not compute the same bits as that at ipc:///a"):
        require_same_bits({"ipc:///a": "x", "ipc:///b": "y"})


def test_engines_of_different_models_are_not_joined() -> None:
    one = resolved_config(dtype="float32")
    require_same_model({"ipc:///a": one, "ipc:///b": one})
    with pytest.raises(ConfigError, match=r"the engine at ipc:///b serves .* in bfloat16, and that at ipc:///a .*"):
        require_same_model({"ipc:///a": one, "ipc:///b": resolved_config(dtype="bfloat16")})


def test_reports_of_engines_are_added_up() -> None:
    one = EngineStats(num_running=1, num_blocks=10, num_free_blocks=5, worker_failures={"hung": 1})
    other = EngineStats(num_running=2, num_blocks=10, waiting_reason="blocks", worker_failures={"hung": 1, "exited": 2})
    summed = total([one, other])
    assert (summed.num_running, summed.num_blocks, summed.kv_cache_usage) == (3, 20, 0.75)
    assert summed.worker_failures == {"hung": 2, "exited": 2}
    assert summed.waiting_reason == "blocks"
