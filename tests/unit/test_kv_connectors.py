"""Connectors of users: how they are named, what they are asked, and what becomes of requests when they fail."""

from pathlib import Path
from typing import Any

import pytest
from connector_fakes import engine_with, memory, submit_of, wait_ready
from core_fakes import CLIENT, FakeEngine, alone, core_config
from waiting import wait_until

from octavo.protocol.config import EngineConfig, ModelConfig, ResolvedConfig, resolve
from octavo.protocol.config.engine import CacheConfig
from octavo.protocol.config.kv_connectors import use_own_settings
from octavo.protocol.config.kv_transfer import ResolvedKVConnector, read_kv_connector, read_kv_transfer
from octavo.protocol.errors import ConfigError
from octavo.protocol.events import Failed, Finished
from octavo.protocol.kv_connector import KVConnectorBase, KVConnectorRole, content_key
from octavo.protocol.kv_connector_loading import open_kv_connector
from octavo.protocol.kv_transfer import KVTransfer
from octavo.protocol.requests import Submit

MODULE = '{"kv_connector": "Mine", "kv_connector_module_path": "mine", "kv_role": "%s"}'


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
    connector.close()


def test_parameters_of_transfers_mean_nothing_to_a_connector() -> None:
    _, connector = engine_with(memory())
    transfer = KVTransfer(takes=True, transfer_id="x")
    ((_, event),) = connector.submit(CLIENT, submit_of("a", [1] * 33, kv_transfer=transfer))
    assert isinstance(event, Failed) and "takes no parameters" in event.message
    continued = connector.submit(CLIENT, submit_of("a", [1] * 3, kv_transfer=transfer, is_continued=True))
    assert isinstance(continued, Submit) and continued.kv_transfer is None
    connector.close()


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


@pytest.mark.parametrize("suffix", ["", ".py"])
def test_a_connector_may_have_dataclasses(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "from __future__ import annotations",
        "import dataclasses, octavo",
        "@dataclasses.dataclass",
        "class Place:",
        "    size: dataclasses.InitVar[int]",
        "class Mine(octavo.KVConnectorBase):",
        "    place = Place(3)",
        *(f"    def {name}(self, *given): return 0" for name in sorted(KVConnectorBase.__abstractmethods__)),
    ]
    (tmp_path / "mine_with_dataclasses.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    path = str(tmp_path / "mine_with_dataclasses.py") if suffix else "mine_with_dataclasses"
    config = core_config(kv_connector=ResolvedKVConnector(name="Mine", module_path=path, role="kv_both"))
    assert type(open_kv_connector(config, KVConnectorRole.WORKER, 0)).__name__ == "Mine"


def test_a_connector_and_files_are_two_stores() -> None:
    def resolved(**fields: Any) -> ResolvedConfig:
        cache = CacheConfig(kv_transfer_config=MODULE % "kv_both", **fields)
        return resolve(
            EngineConfig(model=ModelConfig(model="fake"), cache=cache), core_config().model, device="cpu", num_cores=1
        )

    with pytest.raises(ConfigError, match="--kv-offloading-path and the connector Mine of --kv-transfer-config"):
        resolved(kv_offloading_path="/files")
    assert resolved(kv_offloading_size=1.0).kv_connector is not None


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
        ("OffloadingConnector", {"cpu_bytes_to_use": 1, "store_threshold": 2}, {}, "store_threshold is not supported"),
        ("SimpleCPUOffloadConnector", {"cpu_bytes_to_use": 1, "disk_capacity_bytes": 1}, {}, "needs disk_path"),
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


@pytest.mark.parametrize("field", ["engine_id", "kv_ip", "kv_port", "kv_buffer_size"])
def test_fields_of_transfers_between_engines_mean_nothing_to_stores(field: str) -> None:
    given = {"kv_role": "kv_both", field: 5 if field in ("kv_port", "kv_buffer_size") else "x"}
    extra = {"cpu_bytes_to_use": 1}
    with pytest.raises(ConfigError, match=f"{field} has no meaning for OffloadingConnector"):
        use_own_settings(
            CacheConfig(
                kv_transfer_config={"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra, **given}
            )
        )
    with pytest.raises(ConfigError, match=f"{field} has no meaning for Mine"):
        read_kv_connector({"kv_connector": "Mine", "kv_connector_module_path": "mine", **given})


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
