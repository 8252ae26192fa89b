"""Blocks that move between caches: a worker that verifies what it reads reads what another one has written."""

import random
from collections.abc import Sequence

import pytest
from core_fakes import CLIENT, FakeEngine, alone

from octavo.core_proc import invariants
from octavo.core_proc.cache.exchange import contents_to_offer, num_block_keys
from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.stop import FinishCause
from octavo.protocol.config import CacheGroupSpec
from octavo.protocol.config.kv_transfer import read_kv_transfer
from octavo.protocol.errors import ConfigError, InvalidRequestError
from octavo.protocol.kv_transfer import KVTransfer, read_transfer_params, transfer_params
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit

FULL = CacheGroupSpec(num_layers=1, block_bytes=1000)
WINDOW = CacheGroupSpec(kind="window", window=9, num_layers=1, block_bytes=1000)
STATE = CacheGroupSpec(kind="state", window=16, num_layers=1, block_bytes=1000)
MOVABLE = {
    "full": [FULL],
    "full and window": [FULL, WINDOW],
    "windows": [WINDOW, FULL, WINDOW],
    "window": [WINDOW],
    "states": [FULL, STATE],
    "window and states": [WINDOW, STATE],
    "states only": [STATE],
}
NAMES = "abcd"
SIZE = 4


class Giver:
    """A step hook that takes the contents of what each finished request leaves out of the worker, as a file would."""

    wake_fds: Sequence[int] = ()

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self.given: dict[str, dict[bytes, list[int | None]]] = {}
        engine.scheduler.hooks.add(self)

    def on_step(self) -> list[ClientEvent]:
        return []

    def finish_cause(self, request: Request, cause: FinishCause) -> FinishCause:
        worker = self._engine.worker
        _, blocks, states = contents_to_offer(self._engine.scheduler.cache, request)
        given = {key: worker._cache[SIZE * one : SIZE * (one + 1)] for key, one in blocks}
        given |= {key: [(worker._states or {})[slot]] for key, slot in states}
        self.given[request.request_id] = given
        return cause


def take(engine: FakeEngine, request_id: str, prompt: list[int], given: dict[bytes, list[int | None]]) -> int:
    """Put contents into free blocks of an engine; returns how many."""
    submit = Submit(request_id, prompt, SamplingSpec(max_tokens=1, seed=0))
    keys = list(given)
    rows, states = engine.scheduler.take_blocks(CLIENT, submit, keys)
    for row, block_id in rows:
        engine.worker._cache[SIZE * block_id : SIZE * (block_id + 1)] = given[keys[row]]
    for row, slot in states:
        assert engine.worker._states is not None
        (engine.worker._states[slot],) = given[keys[num_block_keys(engine.scheduler.cache, keys) + row]]
    invariants.check(engine.scheduler)
    return len(rows) + len(states)


@pytest.mark.parametrize("mix", MOVABLE)
def test_a_prompt_is_not_computed_twice(mix: str) -> None:
    first, second = (FakeEngine(64, MOVABLE[mix]) for _ in range(2))
    giver = Giver(first)
    first.submit("a 1", [1] * 35, 1)
    first.run()
    assert take(second, "a 2", [1] * 35, giver.given["a 1"]) > 0
    output = second.submit("a 2", [1] * 35, 6)
    second.run()
    assert (output.num_cached_tokens, output.token_ids) == (32, alone([1] * 35, 6).token_ids)
    assert take(second, "a 3", [1] * 35, giver.given["a 1"]) == 0, "the cache has them"


@pytest.mark.parametrize("num_host_blocks", [0, 40])
@pytest.mark.parametrize("mix", MOVABLE)
def test_random_requests_read_only_what_was_written(mix: str, num_host_blocks: int) -> None:
    rng = random.Random(num_host_blocks)
    groups = MOVABLE[mix]
    first = FakeEngine(40 * len(groups), groups)
    second = FakeEngine(18 * len(groups), groups, kv_offloading_bytes=1000 * num_host_blocks)
    giver = Giver(first)
    num_taken = 0
    for number in range(60):
        name = rng.choice(NAMES)
        prompt = [NAMES.index(name) + 1] * rng.randrange(1, 40) + [rng.randrange(3)] * rng.randrange(1, 12)
        first.submit(f"{name} {number}", prompt, 1)
        first.run()
        num_taken += take(second, f"{name} {number}", prompt, giver.given[f"{name} {number}"])
        second.submit(f"{name} {number}", prompt, rng.randrange(1, 9))
        for _ in range(rng.randrange(12)):
            second.turn()
    second.run()
    assert num_taken > 0


def test_a_state_is_taken_although_a_later_one_is_here_without_its_blocks() -> None:
    first, second = (FakeEngine(64, MOVABLE["states"]) for _ in range(2))
    giver = Giver(first)
    first.submit("a 1", [1] * 20, 1)
    first.run()
    second.submit("a 2", [1] * 35, 1)
    second.run()
    cache, states = second.scheduler.cache, second.scheduler.cache.states
    request = Request(CLIENT, Submit("a 3", [1] * 35, SamplingSpec(max_tokens=1, seed=0)), 0, 0.0)
    states.pool.drop_hash(states.key(request, 4))
    assert states.last_on_device(request, 8) == 8
    cache.pool.forget_contents()
    assert take(second, "a 3", [1] * 35, giver.given["a 1"]) == 5, "four blocks and the state after them"
    output = second.submit("a 3", [1] * 35, 4)
    second.run()
    assert (output.num_cached_tokens, output.token_ids) == (16, alone([1] * 35).token_ids)


def test_nothing_is_taken_that_the_prompt_does_not_determine() -> None:
    first, second = FakeEngine(), FakeEngine()
    giver = Giver(first)
    first.submit("a 1", [1] * 35, 1)
    first.run()
    assert take(second, "a 2", [2] * 35, giver.given["a 1"]) == 0
    some = dict(list(giver.given["a 1"].items())[1:])
    assert take(second, "a 3", [1] * 35, some) == 0, "the first block is missing"
    assert take(second, "a 4", [1] * 10, giver.given["a 1"]) == 2


def test_a_full_cache_takes_what_fits() -> None:
    first, second = FakeEngine(), FakeEngine(num_blocks=12)
    giver = Giver(first)
    first.submit("a 1", [1] * 35, 1)
    first.run()
    second.submit("b 1", [2] * 30, 8)
    second.plan()
    assert take(second, "a 2", [1] * 35, giver.given["a 1"]) == second.scheduler.cache.pool.num_free == 4
    output = second.submit("a 2", [1] * 35, 4)
    second.run()
    assert output.token_ids == alone([1] * 35).token_ids


def test_params_go_out_and_come_back() -> None:
    transfer = KVTransfer(False, True, "engine", "0a" * 16, "10.0.0.1", 7, 64)
    assert read_transfer_params(transfer_params(transfer)) == transfer
    assert read_transfer_params({"do_remote_decode": True, "remote_block_ids": None}) == KVTransfer(leaves=True)
    assert read_transfer_params(None) is None and read_transfer_params({"do_remote_prefill": False}) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "object"),
        ({"do_remote": True}, "do_remote"),
        ({"do_remote_decode": True, "do_remote_prefill": True}, "either leaves blocks"),
        ({"do_remote_prefill": True}, "send what the engine of the prefill has answered"),
        (
            {"do_remote_prefill": True, "remote_engine_id": "../x", "remote_request_id": "0a" * 16},
            "needs remote_engine",
        ),
    ],
)
def test_wrong_params_name_the_field(value: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"kv_transfer_params: .*{message}"):
        read_transfer_params(value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("{", "kv_transfer_config"),
        ({"kv_connector": "NixlConnector", "kv_role": "kv_both"}, "there is no NixlConnector: OctavoConnector"),
        ({"kv_connector": "OctavoConnector", "kv_role": "kv_all"}, "kv_role"),
        ({"kv_connector": "OctavoConnector", "kv_role": "kv_both", "kv_port": 1}, "kv_port needs kv_ip"),
        ({"kv_connector": "OctavoConnector", "kv_role": "kv_both", "engine_id": "a/b"}, "engine_id 'a/b'"),
        ({"kv_connector": "OctavoConnector", "kv_role": "kv_both", "kv_rank": 1}, "kv_rank"),
    ],
)
def test_a_wrong_configuration_names_the_field(setting: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_kv_transfer(setting)  # type: ignore[arg-type]


def test_the_configuration_says_who_gives_and_takes() -> None:
    config = read_kv_transfer('{"kv_connector": "OctavoConnector", "kv_role": "kv_producer", "kv_ip": "127.0.0.1"}')
    assert config is not None and (config.is_producer, config.is_consumer, config.host) == (True, False, "127.0.0.1")
    assert read_kv_transfer(None) is None and read_kv_transfer("") is None
