"""LoRA adapters of a client: several processes, `LoRARequest`, flags, and checks against the base model."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest
from adapter_files import write_adapter
from fake_client import MODEL, resolved_config
from huggingface_hub import constants as hub_constants
from safetensors.numpy import load_file, save_file

from octavo import LoRARequest
from octavo.frontend.cli.flags import configurations
from octavo.frontend.http.app import create_app
from octavo.frontend.lora import reader
from octavo.frontend.lora.reader import read_adapter
from octavo.frontend.lora.registry import AdapterRegistry
from octavo.frontend.lora.startup import check_flags, load_modules
from octavo.protocol.config import ServerConfig
from octavo.protocol.config.sources import engine_config
from octavo.protocol.errors import ConfigError, InvalidRequestError, ModelNotFoundError

CONFIG = resolved_config(enable_lora=True, max_lora_rank=8)


def registry(path: Path | None = None) -> AdapterRegistry:
    adapters = AdapterRegistry(lambda: CONFIG, asyncio.to_thread)
    if path is not None:
        adapters.share(path)
    return adapters


def test_processes_know_the_same_adapters(tmp_path: Path) -> None:
    async def use() -> None:
        first, second = registry(tmp_path / "adapters"), registry(tmp_path / "adapters")
        assert first.named == second.named == {}
        await first.load("a", str(write_adapter(tmp_path / "a")))
        await second.load("b", str(write_adapter(tmp_path / "b")))
        assert set(first.named) == set(second.named) == {"a", "b"}
        with pytest.raises(InvalidRequestError, match="already loaded"):
            await second.load("a", str(tmp_path / "a"))
        second.unload("a")
        assert set(first.named) == {"b"} and await first.find("a") is None
        with pytest.raises(ModelNotFoundError, match="GET /v1/models lists"):
            first.unload("a")
        late = registry(tmp_path / "adapters")
        assert late.named == first.named

    asyncio.run(use())


def test_requests_for_one_new_adapter_read_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(name: str, path: str, config):
        calls.append(name)
        return read_adapter(name, path, config)

    monkeypatch.setattr("octavo.frontend.lora.registry.read_adapter", counted)

    async def use() -> None:
        adapters = registry()
        adapters.resolver_dir = tmp_path
        write_adapter(tmp_path / "a")
        found = await asyncio.gather(*(adapters.find("a") for _ in range(5)))
        assert len(set(map(id, found))) == 1
        request = LoRARequest("b", 1, str(write_adapter(tmp_path / "b")))
        read = await asyncio.gather(*(adapters.of_request(request) for _ in range(5)))
        assert len(set(map(id, read))) == 1
        with pytest.raises(InvalidRequestError, match="lora_int_id 1 is that of the adapter 'b'"):
            await adapters.of_request(LoRARequest("c", 1, str(tmp_path / "a")))
        replaced = await adapters.of_request(LoRARequest("c", 1, str(tmp_path / "a"), load_inplace=True))
        assert replaced.name == "c" and replaced.digest == read[0].digest, "equal contents have equal digests"
        with pytest.raises(InvalidRequestError, match="lora_request must be a LoRARequest, got 'b'"):
            await adapters.of_request("b")
        assert adapters.ids == {1} and adapters.forget(1) and not adapters.forget(1)

    asyncio.run(use())
    assert calls == ["a", "b", "c"]


@pytest.mark.parametrize("fields", [("", 1, "/a"), ("a", 0, "/a"), ("a", True, "/a"), ("a", 1, ""), ("a", "1", "/a")])
def test_a_request_with_a_wrong_field_is_refused(fields) -> None:
    with pytest.raises(InvalidRequestError):
        LoRARequest(*fields)


Q_PROJ = "model.layers.0.self_attn.q_proj"


def test_an_adapter_of_another_base_is_refused_by_its_tensor(tmp_path: Path) -> None:
    save_file({f"{Q_PROJ}.weight": np.zeros((8, 8))}, tmp_path / "model.safetensors")
    model = msgspec.structs.replace(CONFIG.model, model_path=str(tmp_path), load_format="safetensors")
    config = msgspec.structs.replace(CONFIG, model=model)
    reader._weight_header.cache_clear()
    assert read_adapter("a", str(write_adapter(tmp_path / "a")), config).rank == 4
    other = write_adapter(tmp_path / "other", width=16)
    with pytest.raises(InvalidRequestError, match=r"q_proj.lora_A.weight has the shape \(4, 16\).*another model"):
        read_adapter("other", str(other), config)
    file = write_adapter(tmp_path / "added") / "adapter_model.safetensors"
    save_file(load_file(file) | {f"base_model.model.{Q_PROJ}.base_layer.weight": np.zeros((9, 8))}, file)
    with pytest.raises(InvalidRequestError, match=r"\(9, 8\).*tokens were added before training; merge"):
        read_adapter("added", str(file.parent), config)


def test_shapes_of_packed_weights_are_not_compared(tmp_path: Path) -> None:
    save_file({f"{Q_PROJ}.weight": np.zeros((32, 1), dtype=np.uint8)}, tmp_path / "model.safetensors")
    model = msgspec.structs.replace(CONFIG.model, model_path=str(tmp_path), load_format="safetensors")
    reader._weight_header.cache_clear()
    config = msgspec.structs.replace(CONFIG, model=model)
    assert read_adapter("a", str(write_adapter(tmp_path / "a")), config).rank == 4


def test_an_engine_without_adapters_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="--enable-lora"):
        read_adapter("a", str(write_adapter(tmp_path / "a")), resolved_config())


def test_modules_of_the_command_line(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a")
    _, server = configurations(
        {
            "model": "M",
            "enable_lora": True,
            "lora_modules": [
                f"a={path}",
                f'{{"name": "b", "path": "{path}", "base_model_name": "base", "is_3d_lora_weight": true}}',
            ],
        }
    )
    adapters = registry()
    asyncio.run(load_modules(server, adapters))
    assert {name: one.parent for name, one in adapters.named.items()} == {"a": None, "b": "base"}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"lora_modules": ["a"]}, "lacks a name or a path"),
        ({"lora_modules": ['{"name": "a"}']}, "missing required field `path`"),
        ({"lora_modules": ["a=/a", "a=/b"]}, "two adapters are named 'a'"),
        ({"lora_modules": ["a=/a"], "headless": True}, "--lora-modules needs an HTTP server"),
        ({"lora_resolver_dir": "/nowhere"}, "/nowhere is not a directory"),
    ],
)
def test_wrong_flags_of_a_server_are_refused(settings, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_flags(ServerConfig(**settings), has_adapters=True)


def test_adapters_need_an_engine_that_has_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--allow-runtime-lora-updating needs an engine with --enable-lora"):
        check_flags(ServerConfig(allow_runtime_lora_updating=True), has_adapters=False)
    with pytest.raises(ConfigError, match=f"lora_modules: a: .*{MODEL}|lora_modules: a:"):
        asyncio.run(load_modules(ServerConfig(lora_modules=[f"a={tmp_path}"]), registry()))
    with pytest.raises(ConfigError, match=r"await client.adapters.load|octavo serve only"):
        create_app(None, ServerConfig(lora_modules=["a=/a"]))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"max_loras": 2}, "max_loras needs enable_lora"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 3}, "below max_loras"),
        ({"enable_lora": True, "max_lora_rank": 1024}, "max_lora_rank"),
    ],
)
def test_wrong_flags_of_an_engine_are_refused(settings, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        resolved_config(**settings)


def test_the_settings_of_an_engine() -> None:
    assert resolved_config().lora is None and engine_config({"model": "M"}).lora.enable_lora is False
    lora = resolved_config(enable_lora=True, max_loras=3, dtype="float32").lora
    assert (lora.max_loras, lora.max_rank, lora.max_cpu_loras, lora.dtype) == (3, 16, 3, "float32")


def cached_adapter(cache: Path, monkeypatch: pytest.MonkeyPatch, revision: str = "main", **settings) -> Path:
    """Write a hub cache with one commit of org/name that is an adapter; return its directory."""
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    repository, commit = cache / "models--org--name", f"{len(revision):040}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / revision).write_text(commit)
    return write_adapter(repository / "snapshots" / commit, **settings)


def test_an_adapter_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = cached_adapter(tmp_path / "hub", monkeypatch)
    other = cached_adapter(tmp_path / "hub", monkeypatch, "second", value=0.25)

    async def use() -> None:
        adapters = registry()
        await load_modules(ServerConfig(lora_modules=["a=org/name", "b=org/name@second"]), adapters)
        assert [one.adapter.path for one in adapters.named.values()] == [str(snapshot), str(other)]
        request = LoRARequest("c", 1, "org/name")
        first = await adapters.of_request(request)
        assert first.path == str(snapshot) and await adapters.of_request(request) is first

    asyncio.run(use())


def test_a_download_directory_is_the_cache_of_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = cached_adapter(tmp_path / "downloads", monkeypatch)
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    config = resolved_config(enable_lora=True, download_dir=str(tmp_path / "downloads"))
    adapters = AdapterRegistry(lambda: config, asyncio.to_thread)
    asyncio.run(adapters.load("a", "org/name"))
    assert adapters.named["a"].adapter.path == str(snapshot)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("org/other", "HF_HUB_OFFLINE=1 forbids a download.*hf download org/other"),
        ("org/name@v9", "org/name is neither a local path nor complete"),
        ("org/name", "org/name is neither a local path nor complete"),  # its weights are not there
        ("/nowhere/adapter", "no such directory: /nowhere/adapter"),
        ("a/b/c", "no such directory: a/b/c"),
        ("-/..", "neither an existing path nor a valid hub id"),
    ],
)
def test_an_adapter_that_is_nowhere(path: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cached_adapter(tmp_path, monkeypatch) / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        asyncio.run(registry().of_request(LoRARequest("a", 1, path)))
    assert caught.value.param == "lora_path"
