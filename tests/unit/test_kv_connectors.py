"""Connectors of users: how they are named, what they are asked, and what becomes of requests when they fail."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
from core_fakes import CLIENT, FakeEngine, alone, core_config
from waiting import wait_until

from octavo.core_proc.transfer.plugin import PluginConnector
from octavo.protocol.config.engine import CacheConfig
from octavo.protocol.config.kv_connectors import use_own_settings
from octavo.protocol.config.kv_transfer import ResolvedKVConnector, read_kv_connector, read_kv_transfer
from octavo.protocol.errors import ConfigError
from octavo.protocol.events import Failed, Finished
from octavo.protocol.kv_connector import (
    ConnectorRequest,
    KVBlock,
    KVConnectorBase,
    KVConnectorConfig,
    KVConnectorRole,
    content_key,
)
from octavo.protocol.kv_connector_loading import open_kv_connector
from octavo.protocol.kv_transfer import KVTransfer
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit
from octavo.worker_proc.cache.connector_store import ConnectorStore

MODULE = '{"kv_connector": "Mine", "kv_connector_module_path": "mine", "kv_role": "%s"}'


class Memory(KVConnectorBase):
    """Keeps contents in a dictionary."""

    def __init__(self, config: KVConnectorConfig, role: KVConnectorRole) -> None:
        super().__init__(config, role)
        self.contents: dict[str, bytes] = {}
        self.asked: list[tuple[str, int]] = []
        self.finished: list[str] = []
        self.forgotten: list[str] = []
        self.failed: list[str] = []
        self.error: Exception | None = None

    def get_num_new_matched_tokens(self, request: ConnectorRequest, num_computed_tokens: int) -> int:
        if self.error is not None:
            raise self.error
        self.asked.append((request.request_id, num_computed_tokens))
        num_found = 0
        for keys in request.block_keys[num_computed_tokens // self.config.block_size :]:
            if any(key not in self.contents for key in keys):
                break
            num_found += 1
        return num_found * self.config.block_size

    def request_finished(self, request_id: str) -> None:
        self.finished.append(request_id)

    def forget(self, keys: Sequence[str]) -> None:
        self.forgotten += keys

    def start_load_kv(self, blocks: Sequence[KVBlock]) -> None:
        if self.error is not None:
            raise self.error
        self.failed = [key for key, _ in blocks if key not in self.contents]
        for key, content in blocks:
            content[:] = self.contents.get(key, bytes(content))

    def wait_for_load(self) -> Collection[str]:
        return self.failed

    def save_kv(self, blocks: Sequence[KVBlock]) -> None:
        self.contents.update({key: bytes(content) for key, content in blocks})

    def wait_for_save(self) -> Collection[str]:
        return []


def memory(block_size: int = 4) -> Memory:
    return Memory(KVConnectorConfig({}, block_size, 1, -1), KVConnectorRole.SCHEDULER)


def engine_with(plugin: Memory, **fields: bool) -> tuple[FakeEngine, PluginConnector]:
    setting = ResolvedKVConnector(name="Memory", module_path="", role="kv_both")
    engine = FakeEngine(16, kv_connector=setting)
    return engine, PluginConnector(plugin, engine.scheduler, "here", **{"loads": True, **fields})


def submit_of(request_id: str, prompt: list[int], **fields: Any) -> Submit:
    return Submit(request_id, prompt, SamplingSpec(max_tokens=4, seed=0), **fields)


def wait_ready(connector: PluginConnector) -> list[tuple[bytes, Submit]]:
    ready: list[tuple[bytes, Submit]] = []
    wait_until(lambda: bool(ready.extend(connector.take_ready()) or ready))
    return ready


def test_what_a_connector_finds_is_loaded_and_the_rest_is_computed() -> None:
    plugin = memory()
    other = FakeEngine(16, kv_offloading_path="/files")
    other.submit("first", [1] * 33)
    other.run()
    engine, connector = engine_with(plugin)
    engine.files.update(other.files)
    keys = [key for key, states in other.files.items() if states is not None]
    plugin.contents = {content_key("here", key): b"" for key in keys[:5]}
    assert connector.submit(CLIENT, submit_of("again", [1] * 33)) == []
    assert connector.num_waiting == 1 and connector.is_waiting((CLIENT, "again"))
    ((client, submit),) = wait_ready(connector)
    assert connector.num_waiting == 0
    output = engine.submit(submit.request_id, list(submit.prompt_token_ids))
    engine.run()
    assert client == CLIENT
    assert plugin.asked == [("again", 0)]
    assert output.num_cached_tokens == 20
    assert output.token_ids == alone([1] * 33).token_ids
    connector.close()


def test_nobody_is_asked_about_what_the_cache_has_or_may_not_be_loaded() -> None:
    plugin = memory()
    engine, connector = engine_with(plugin)
    engine.submit("first", [1] * 33)
    engine.run()
    cached, short = submit_of("cached", [1] * 33), submit_of("short", [1] * 4)
    assert connector.submit(CLIENT, cached) == cached
    assert connector.submit(CLIENT, short) == short
    connector.close()
    engine, connector = engine_with(plugin, loads=False)
    saved = submit_of("only saved", [2] * 33)
    assert connector.submit(CLIENT, saved) == saved
    connector.close()
    assert plugin.asked == []


def test_a_connector_that_raises_delays_nobody_for_long() -> None:
    plugin = memory()
    plugin.error = ValueError("broken")
    _, connector = engine_with(plugin)
    connector.submit(CLIENT, submit_of("unlucky", [1] * 33))
    ((_, submit),) = wait_ready(connector)
    assert submit.request_id == "unlucky"
    connector.close()


def test_aborted_requests_do_not_come_back() -> None:
    plugin = memory()
    _, connector = engine_with(plugin)
    connector.submit(CLIENT, submit_of("gone", [1] * 33))
    ((client, event),) = connector.abort(CLIENT, ["gone", "unknown"])
    assert client == CLIENT and isinstance(event, Finished)
    connector.submit(CLIENT, submit_of("gone", [2] * 33))
    ((_, submit),) = wait_ready(connector)
    assert list(submit.prompt_token_ids) == [2] * 33
    connector.delete([b"\1"])
    wait_until(lambda: plugin.forgotten == ["here/01"])
    assert plugin.finished == ["gone", "unknown"]
    connector.close()


def test_parameters_of_transfers_mean_nothing_to_a_connector() -> None:
    _, connector = engine_with(memory())
    transfer = KVTransfer(takes=True, transfer_id="x")
    ((_, event),) = connector.submit(CLIENT, submit_of("a", [1] * 33, kv_transfer=transfer))
    assert isinstance(event, Failed) and "takes no parameters" in event.message
    continued = connector.submit(CLIENT, submit_of("a", [1] * 3, kv_transfer=transfer, is_continued=True))
    assert isinstance(continued, Submit) and continued.kv_transfer is None
    connector.close()


def test_workers_load_what_was_saved_and_miss_what_fails() -> None:
    plugin = memory()
    store = ConnectorStore(plugin)
    room = [bytearray(3), bytearray(3)]
    assert store.write_all("here", [(b"a", memoryview(b"abc"))]) == [True]
    contents = [(key, memoryview(buffer)) for key, buffer in zip((b"a", b"b"), room, strict=True)]
    assert store.read_all("here", contents) == [True, False]
    assert store.read_all("elsewhere", contents[:1]) == [False]
    assert room[0] == b"abc"
    plugin.error = OSError("no connection")
    assert store.read_all("here", contents) == [False, False]
    store.close()


@pytest.mark.parametrize(("role", "saves", "loads"), [("kv_producer", 1, 0), ("kv_consumer", 0, 1), ("kv_both", 1, 1)])
def test_a_module_path_names_code_of_the_user(role: str, saves: int, loads: int) -> None:
    setting = read_kv_connector(MODULE % role)
    assert setting is not None and (setting.name, setting.module_path) == ("Mine", "mine")
    assert (setting.saves, setting.loads) == (saves, loads)
    assert read_kv_transfer(MODULE % role) is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "AttributeError"),
        ("raise OSError('unlucky')", "OSError: unlucky"),
        ("class Mine: pass", "does not derive from octavo.KVConnectorBase"),
        ("import octavo\nclass Mine(octavo.KVConnectorBase): pass", "abstract"),
        (None, "not a Python file"),
    ],
)
def test_a_connector_that_cannot_be_made_is_named(source: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    if source is not None:
        path.write_text(source)
    config = core_config(kv_connector=ResolvedKVConnector(name="Mine", module_path=str(path), role="kv_both"))
    with pytest.raises(ConfigError, match=message):
        open_kv_connector(config, KVConnectorRole.WORKER, 0)


def cache_of(name: str, extra: dict[str, Any], role: str = "kv_both", **fields: Any) -> CacheConfig:
    config = {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra}
    return use_own_settings(CacheConfig(kv_transfer_config=config, **fields))


def test_connectors_of_vllm_become_settings() -> None:
    cache = cache_of("OffloadingConnector", {"cpu_bytes_to_use": 2**31, "spec_name": "CPUOffloadingSpec"})
    assert cache == CacheConfig(kv_offloading_size=2.0)
    extra = {"cpu_bytes_to_use_per_rank": 2**30, "disk_path": "/blocks", "disk_capacity_bytes": 2**33}
    cache = cache_of("SimpleCPUOffloadConnector", extra)
    assert cache == CacheConfig(swap_space=1.0, kv_offloading_path="/blocks", kv_offloading_disk_size=8.0)
    for name in ("ExampleConnector", "SharedStorageConnector"):
        assert cache_of(name, {"shared_storage_path": "/x"}) == CacheConfig(kv_offloading_path="/x")


@pytest.mark.parametrize(
    ("name", "extra", "fields", "message"),
    [
        ("OffloadingConnector", {}, {}, "needs cpu_bytes_to_use"),
        ("OffloadingConnector", {"cpu_bytes_to_use": "8GB"}, {}, "not a number of bytes"),
        ("OffloadingConnector", {"cpu_bytes_to_use": 1, "spec_name": "Mine"}, {}, "spec_name must be"),
        ("OffloadingConnector", {"cpu_bytes_to_use": 1, "store_threshold": 2}, {}, "no store_threshold"),
        ("OffloadingConnector", {"cpu_bytes_to_use": 1}, {"kv_offloading_size": 1.0}, "two names of one setting"),
        ("OffloadingConnector", {"cpu_bytes_to_use": 1}, {"role": "kv_producer"}, "needs the kv_role kv_both"),
        ("ExampleConnector", {}, {}, "needs shared_storage_path"),
    ],
)
def test_connectors_of_vllm_are_read_strictly(
    name: str, extra: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        cache_of(name, extra, **fields)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NixlConnector", "OctavoConnector moves blocks"),
        ("LMCacheConnectorV1", "kv_connector_module_path"),
        ("MultiConnector", "work together"),
        ("Nobody", "no kv_connector_module_path says where it is"),
    ],
)
def test_other_connectors_are_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_kv_transfer({"kv_connector": name, "kv_role": "kv_both"})
