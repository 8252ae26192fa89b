"""Changes of the prefix cache in vLLM's format: what a router outside octavo learns."""

import itertools
import random
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from core_fakes import FakeEngine, core_config
from simulation.worker import ONE_GROUP
from waiting import wait_until

from octavo.core_proc.cache.groups import CacheGroups
from octavo.core_proc.kv_events import KVEventPublisher
from octavo.protocol.config import CacheGroupSpec
from octavo.protocol.config.kv_events import KVEventsConfig, endpoint_of_engine, read_kv_events
from octavo.protocol.errors import ConfigError, StartupError
from octavo.protocol.prefix_hash import ROOT_HASH, ExtraKey, hash_block

END = b"\xff" * 8
SIZE = 4


class Published:
    """An engine that publishes, and a router that asks for all batches."""

    def __init__(
        self, folder: Path, num_host_blocks: int = 0, groups: Sequence[CacheGroupSpec] = ONE_GROUP, **config: Any
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.endpoint, replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        self.config = KVEventsConfig(
            enable_kv_cache_events=True, endpoint=self.endpoint, replay_endpoint=replay, **config
        )
        offloading = {"kv_offloading_bytes": 1000 * num_host_blocks}
        self.engine = FakeEngine(16, groups, block_size=SIZE, max_num_seqs=4, **offloading)
        self.cache = self.engine.scheduler.cache
        self.publisher = KVEventPublisher(self.context, self.config, 0, self.cache.groups, is_replacement=False)
        self.publisher.observe(self.cache)
        self.engine.scheduler.hooks.add(self.publisher)
        self.client: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        self.client.linger, self.client.rcvtimeo = 0, 10_000
        self.client.connect(replay)

    def batches(self, start: int = 0) -> list[tuple[int, list[Any]]]:
        """Ask for all batches from a sequence number on."""
        return [(number, msgspec.msgpack.decode(payload)) for number, payload in self.payloads(start)]

    def payloads(self, start: int = 0) -> list[tuple[int, bytes]]:
        """Return the same as it was sent."""
        self.client.send_multipart((b"", start.to_bytes(8, "big")))
        found = []
        while (frames := self.client.recv_multipart())[2] != END:
            assert frames[:2] == [b"", self.config.topic.encode()]
            found.append((int.from_bytes(frames[2], "big"), frames[3]))
        return found

    def all_batches(self) -> list[tuple[int, list[Any]]]:
        """Return every batch, once the thread has them."""
        self.publisher.on_step()
        wait_until(lambda: len(self.batches()) >= min(self.publisher._sequence, self.config.buffer_steps))
        return self.batches()

    def close(self) -> None:
        self.client.close()
        self.publisher.close()
        self.context.term()


@pytest.fixture
def published(tmp_path: Path) -> Iterator[Published]:
    made = Published(tmp_path)
    yield made
    made.close()


class VllmEvent(msgspec.Struct, omit_defaults=True, tag=True):
    """The base of vLLM 0.32's events, which its routers decode strictly by type and loosely by field."""


class BlockStored(VllmEvent):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(VllmEvent):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(VllmEvent):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def apply(batches: list[tuple[int, list[Any]]]) -> set[int]:
    """Return the blocks that can be found after these batches, by what the events say."""
    found: set[int] = set()
    for _, (_, events, _) in batches:
        for event in events:
            match event["type"]:
                case "BlockStored":
                    assert len(event["token_ids"]) == SIZE * len(event["block_hashes"])
                    found |= set(event["block_hashes"])
                case "BlockRemoved":
                    assert set(event["block_hashes"]) <= found, "only what was stored is removed"
                    found -= set(event["block_hashes"])
                case "AllBlocksCleared":
                    found.clear()
    return found


def test_events_equal_the_cache_after_many_requests(published: Published) -> None:
    engine, rng = published.engine, random.Random(3)
    for number in range(40):
        family, length = rng.randrange(4), rng.randrange(1, 40)
        engine.submit(f"r{number}", [family] * length, 6)
        if number % 3 == 0:
            engine.run()
        if number == 20:
            engine.run()
            assert engine.scheduler.reset_prefix_cache()
    engine.run()
    batches = published.all_batches()
    assert [sequence for sequence, _ in batches] == list(range(len(batches)))
    assert {batch[2] for _, batch in batches} == {0}
    kinds = {event["type"] for _, batch in batches for event in batch[1]}
    assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    cached = {int.from_bytes(block_hash[24:32], "big") for block_hash in published.cache.pool.cached_hashes()}
    assert apply(batches) == cached


def test_readers_of_vllm_decode_the_events_of_both_storeys(tmp_path: Path) -> None:
    published = Published(tmp_path, num_host_blocks=6)
    engine, on_device, on_host = published.engine, set[object](), set[object]()
    for number in range(12):
        engine.submit(f"r{number}", [number % 5 + 1] * 20, 4)
        engine.run()
    published.all_batches()
    kinds = set()
    for _, payload in published.payloads():
        for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
            assert not isinstance(event, AllBlocksCleared)
            found = on_device if event.medium == "GPU" else on_host
            kinds.add((type(event), event.medium))
            if isinstance(event, BlockStored):
                found |= set(event.block_hashes)
            else:
                assert set(event.block_hashes) <= found
                found -= set(event.block_hashes)
    assert kinds == {(kind, medium) for kind in (BlockStored, BlockRemoved) for medium in ("GPU", "CPU")}
    host = published.cache.host
    assert host is not None and len(on_host) == len(host) == 6
    assert on_device == {int.from_bytes(key[24:32], "big") for key in published.cache.pool.cached_hashes()}
    published.close()


@pytest.mark.parametrize("with_keys", [True, False])
def test_checkpoints_of_states_are_blocks_of_their_group(tmp_path: Path, with_keys: bool) -> None:
    """A router knows from the events alone after how many tokens a prompt can continue, on the device or from host."""
    state = CacheGroupSpec(kind="state", window=16, num_layers=1, block_bytes=1000)
    groups = [CacheGroupSpec(num_layers=1, block_bytes=1000)] * with_keys + [state]
    published = Published(tmp_path, num_host_blocks=400, groups=groups)
    engine, states, prompts = published.engine, published.cache.states, [[number + 1] * 40 for number in range(7)]
    assert states is not None and states.host is not None
    for number, prompt in enumerate([*prompts, prompts[0]]):
        engine.submit(f"r{number}", prompt, 1)
        engine.run()
    assert engine.worker.num_states_copied_in
    published.all_batches()
    found: dict[str | None, dict[object, BlockStored]] = {"GPU": {}, "CPU": {}}
    for _, payload in published.payloads():
        for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
            if isinstance(event, BlockStored) and event.group_idx == with_keys:
                found[event.medium][event.block_hashes[0]] = event
            elif isinstance(event, BlockRemoved) and event.group_idx == with_keys:
                del found[event.medium][event.block_hashes[0]]
    cached = {int.from_bytes(key[24:32], "big") for key in states.pool.cached_hashes()}
    assert found["GPU"].keys() == cached and len(found["CPU"]) == len(states.host)
    assert {event.kv_cache_spec_kind for event in found["GPU"].values()} == {"mamba"}
    chain = [event for event in found["GPU"].values() if event.token_ids[0] == prompts[-1][0]]
    assert [event.block_size for event in chain] == [16, 16, 8] == [len(event.token_ids) for event in chain]
    assert [event.parent_block_hash for event in chain] == [None, *(event.block_hashes[0] for event in chain[:2])]
    published.close()


def test_blocks_after_a_checkpoint_from_host_memory_are_an_event_of_their_own(tmp_path: Path) -> None:
    state = CacheGroupSpec(kind="state", window=16, num_layers=1, block_bytes=1000)
    groups = [CacheGroupSpec(num_layers=1, block_bytes=1000), state]
    published = Published(tmp_path, num_host_blocks=400, groups=groups)
    engine, prefix = published.engine, list(range(1, 17))
    engine.submit("first", prefix, 1)
    engine.run()
    for number in range(11):
        engine.submit(f"r{number}", [20 + number] * 16, 2)
        engine.run()
    engine.submit("again", prefix + [40] * 20, 1)
    engine.run()
    assert engine.worker.num_states_copied_in
    for _, (_, events, _) in published.all_batches():
        for event in events:
            if event["type"] == "BlockStored" and event["medium"] == "GPU":
                assert len(event["block_hashes"]) * event["block_size"] == len(event["token_ids"])
    published.close()


def test_the_blocks_of_a_prompt_are_one_event_from_which_their_hashes_follow(published: Published) -> None:
    prompt = list(range(1, 15))
    published.engine.submit("r", prompt, 1, cache_salt="tenant")
    published.engine.run()
    ((_, (_, events, _)),) = published.all_batches()
    (event,) = events
    assert event["token_ids"] == prompt[:12] and event["parent_block_hash"] is None
    assert (event["block_size"], event["medium"], event["group_idx"]) == (SIZE, "GPU", 0)
    assert event["extra_keys"] == [["tenant"], None, None] and event["kv_cache_spec_kind"] == "full_attention"
    parent, hashes = ROOT_HASH, []
    for start in range(0, 12, SIZE):
        parent = hash_block(parent, array("i", prompt[start : start + SIZE]), start, (ExtraKey(0, "salt", "tenant"),))
        hashes.append(int.from_bytes(parent[24:], "big"))
    assert event["block_hashes"] == hashes
    published.engine.submit("longer", [*prompt, 7, 7, 7], 1, cache_salt="tenant")
    published.engine.run()
    later = published.all_batches()[-1][1][1][0]
    assert (later["parent_block_hash"], later["token_ids"]) == (hashes[-1], [13, 14, 7, 7])


def test_subscribers_get_topic_sequence_and_batch(tmp_path: Path) -> None:
    published = Published(tmp_path, topic="kv")
    subscriber: zmq.Socket[bytes] = published.context.socket(zmq.SUB)
    subscriber.linger = 0
    subscriber.connect(published.endpoint)
    subscriber.subscribe("kv")
    prompts = itertools.count()

    def is_heard() -> bool:  # a subscription takes a moment to arrive
        published.engine.submit(f"r{next(prompts)}", [next(prompts)] * 9, 1)
        published.engine.run()
        published.publisher.on_step()
        return bool(subscriber.poll(20))

    wait_until(is_heard)
    topic, sequence, batch = subscriber.recv_multipart()
    assert (topic, len(sequence)) == (b"kv", 8)
    assert msgspec.msgpack.decode(batch)[1][0]["type"] == "BlockStored"
    subscriber.close()
    published.close()


def test_only_the_latest_batches_are_kept(tmp_path: Path) -> None:
    published = Published(tmp_path, buffer_steps=2)
    for number in range(4):
        published.publisher.on_removed(bytes([number]) * 32)
        published.publisher.on_step()
    wait_until(lambda: [sequence for sequence, _ in published.batches()] == [2, 3])
    assert [sequence for sequence, _ in published.batches(3)] == [3]
    published.close()


def test_windows_are_named(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    specs = [
        CacheGroupSpec(num_layers=1, block_bytes=1),
        CacheGroupSpec(num_layers=1, block_bytes=1, kind="window", window=8),
    ]
    groups = CacheGroups.of(core_config(), specs)
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"ipc://{tmp_path}/events")
    publisher = KVEventPublisher(context, config, 3, groups, is_replacement=False)
    engine = FakeEngine()
    engine.submit("r", [1] * 9, 1)
    engine.plan()
    (request,) = engine.scheduler.running
    publisher.on_stored(request, 0, 1)
    publisher.on_removed(request.block_hashes[0] + groups.key_suffixes[1])
    stored, removed = publisher._events
    assert (stored.group_idx, stored.kv_cache_spec_kind, stored.kv_cache_spec_sliding_window) == (
        1,
        "sliding_window",
        8,
    )
    assert (removed.group_idx, removed.block_hashes) == (1, stored.block_hashes)
    publisher.close()
    context.term()


def test_an_address_in_use_fails_unless_its_owner_is_being_replaced(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    owner: zmq.Socket[bytes] = context.socket(zmq.PUB)
    port = owner.bind_to_random_port("tcp://127.0.0.1")
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://127.0.0.1:{port}")
    groups = CacheGroups.of(core_config(), [CacheGroupSpec(num_layers=1, block_bytes=1)])
    with zmq.Context() as other, pytest.raises(StartupError, match=f"kv_events_config: tcp://127.0.0.1:{port}"):
        KVEventPublisher(other, config, 0, groups, is_replacement=False)
    publisher = KVEventPublisher(context, config, 0, groups, is_replacement=True)
    owner.close(linger=0)

    def is_bound() -> bool:
        with zmq.Context() as other, other.socket(zmq.PUB) as rival:
            try:
                rival.bind(config.endpoint)
            except zmq.ZMQError:
                return True
            return False

    wait_until(is_bound)
    publisher.close()
    context.term()


@pytest.mark.parametrize("setting", [None, "", {}, "{}", {"enable_kv_cache_events": True, "publisher": "null"}])
def test_nothing_is_published_unless_asked(setting: Any) -> None:
    assert read_kv_events(setting) is None


def test_the_configuration_is_that_of_vllm() -> None:
    config = read_kv_events('{"enable_kv_cache_events": true, "topic": "kv", "buffer_steps": 5, "publisher": "zmq"}')
    assert config is not None and (config.topic, config.buffer_steps) == ("kv", 5)
    assert config.endpoint.startswith("tcp://127.0.0.1:")
    assert endpoint_of_engine(config.endpoint, 2) == "tcp://127.0.0.1:5559"
    assert endpoint_of_engine("ipc:///a", 2) == "ipc:///a_dp2"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('{"enable": true}', "enable"),
        ("not json", "kv_events_config"),
        ({"enable_kv_cache_events": True, "endpoint": "localhost:1"}, "endpoint 'localhost:1' is no address"),
        ({"publisher": "kafka"}, "publisher"),
    ],
)
def test_a_wrong_configuration_names_the_field(setting: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_kv_events(setting)
