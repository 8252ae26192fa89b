"""LoRA adapters over HTTP: models by name, loading and unloading, and adapters that are loaded on first use."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from adapter_files import write_adapter
from fake_client import MODEL, FakeClient
from http_client import post, request
from safetensors.numpy import load_file, save_file

from octavo.frontend.http.app_state import MAX_NAMES
from octavo.protocol.config import ServerConfig

UPDATING = ServerConfig(fingerprint_mode="none", allow_runtime_lora_updating=True)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def lora_client() -> FakeClient:
    return FakeClient(enable_lora=True, max_lora_rank=8)


def error_of(response) -> str:
    return response.json()["error"]["message"]


def test_an_adapter_is_a_model_from_loading_to_unloading(tmp_path: Path) -> None:
    client, path = lora_client(), write_adapter(tmp_path / "sql")
    loaded = post(client, LOAD, {"lora_name": "sql", "lora_path": str(path)}, config=UPDATING)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    cards = request(client, "GET", "/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [(MODEL, None), ("alias", None), ("sql", MODEL)]
    assert cards[2]["root"] == str(path) and request(client, "GET", "/v1/models/sql").json() == cards[2]

    chat = {"model": "sql", "messages": [{"role": "user", "content": "x"}]}
    assert post(client, "/v1/chat/completions", chat).json()["model"] == "sql"
    assert post(client, "/v1/completions", {"model": "sql", "prompt": "x"}).json()["model"] == "sql"
    post(client, "/v1/completions", {"model": MODEL, "prompt": "x"})
    assert post(client, "/tokenize", {"model": "sql", "prompt": "x"}).status_code == 200
    adapters = [one["adapter"] for one in client.requests]
    assert adapters[0] == adapters[1] and adapters[2] is None
    assert (adapters[0].name, adapters[0].path, adapters[0].rank) == ("sql", str(path), 4)

    unloaded = post(client, UNLOAD, {"lora_name": "sql"}, config=UPDATING)
    assert unloaded.text == "Success: LoRA adapter 'sql' removed successfully."
    missing = post(client, "/v1/completions", {"model": "sql", "prompt": "x"})
    assert missing.status_code == 404 and f"{MODEL!r} or 'alias'" in error_of(missing)
    again = post(client, UNLOAD, {"lora_name": "sql"}, config=UPDATING)
    assert again.status_code == 404 and "none is loaded" in error_of(again)


def test_an_unknown_name_shows_only_the_first_of_many(tmp_path: Path) -> None:
    client, path = lora_client(), str(write_adapter(tmp_path / "a"))
    for index in range(MAX_NAMES):
        asyncio.run(client.adapters.load(f"a{index}", path))
    message = error_of(post(client, "/v1/completions", {"model": "nobody", "prompt": "x"}))
    assert message.endswith("'a12' or 'a13' or one of GET /v1/models")


def test_a_taken_name_needs_load_inplace(tmp_path: Path) -> None:
    client, path = lora_client(), write_adapter(tmp_path / "sql")
    body = {"lora_name": "sql", "lora_path": str(path)}
    post(client, LOAD, body, config=UPDATING)
    old = client.adapters.named["sql"].adapter
    refused = post(client, LOAD, body, config=UPDATING)
    assert refused.status_code == 400 and "load_inplace" in error_of(refused)
    write_adapter(path, value=0.25)
    assert post(client, LOAD, {**body, "load_inplace": True}, config=UPDATING).status_code == 200
    new = client.adapters.named["sql"].adapter
    assert new.digest != old.digest and new.path == old.path


def test_adapters_cannot_be_changed_unless_that_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"lora_name": "sql", "lora_path": str(write_adapter(tmp_path / "sql"))}
    assert post(lora_client(), LOAD, body).status_code == 404
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
    assert post(lora_client(), LOAD, body).status_code == 200


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"rank": 9}, "rank 9, but the limit is --max-lora-rank 8"),
        ({"use_dora": True}, "DoRA"),
        ({"peft_type": "IA3"}, "'IA3'"),
        ({"bias": "all"}, "bias"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused_by_its_field(tmp_path: Path, settings, problem: str) -> None:
    path = write_adapter(tmp_path / "a", **settings)
    refused = post(lora_client(), LOAD, {"lora_name": "a", "lora_path": str(path)}, config=UPDATING)
    assert refused.status_code == 400 and problem in error_of(refused)


@pytest.mark.parametrize("name", [MODEL, "", "a\n"])
def test_a_name_that_cannot_be_used_is_refused(tmp_path: Path, name: str) -> None:
    path = write_adapter(tmp_path / "a")
    refused = post(lora_client(), LOAD, {"lora_name": name, "lora_path": str(path)}, config=UPDATING)
    assert refused.status_code == 400


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    body = {"lora_name": "a", "lora_path": str(tmp_path / "empty")}
    assert "has no adapter_config.json" in error_of(post(lora_client(), LOAD, body, config=UPDATING))
    damaged = write_adapter(tmp_path / "damaged")
    (damaged / "adapter_model.safetensors").write_bytes(b"\xff" * 20)
    body = {"lora_name": "a", "lora_path": str(damaged)}
    assert "is damaged" in error_of(post(lora_client(), LOAD, body, config=UPDATING))


Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("settings", "tensors", "problem"),
    [
        ({}, {f"{Q_PROJ}.lora_A.weight": None}, "only one of its two factors"),
        ({}, {f"{Q_PROJ}.lora_B.weight": np.zeros((8, 4), np.int32)}, "has type I32"),
        ({}, {f"{Q_PROJ}.lora_A.weight": np.zeros(4, np.float32)}, "has type F32 and shape (4,)"),
        ({}, {f"{Q_PROJ}.lora_A.weight": None, f"{Q_PROJ}.lora_B.weight": None}, "it changes nothing"),
        ({}, {"base_model.model.lm_head.weight": np.zeros((9, 8), np.float32)}, "if tokens were added before training"),
        ({"r": 2}, {}, "adapter_config.json gives it the rank 2"),
        ({"target_modules": ["v_proj"]}, {}, "target_modules does not name"),
    ],
)
def test_tensors_that_are_no_adapter_are_refused_when_it_is_loaded(tmp_path: Path, settings, tensors, problem) -> None:
    file = write_adapter(tmp_path / "a", **settings) / "adapter_model.safetensors"
    changed = {**load_file(file), **tensors}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, file)
    refused = post(lora_client(), LOAD, {"lora_name": "a", "lora_path": str(file.parent)}, config=UPDATING)
    assert refused.status_code == 400 and problem in error_of(refused)


def test_a_file_that_is_cut_short_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    file = write_adapter(tmp_path / "a") / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    refused = post(lora_client(), LOAD, {"lora_name": "a", "lora_path": str(file.parent)}, config=UPDATING)
    assert refused.status_code == 400 and "cut short" in error_of(refused)


def test_the_first_request_for_an_adapter_of_the_directory_loads_it(tmp_path: Path) -> None:
    write_adapter(tmp_path / "loras" / "sql")
    write_adapter(tmp_path / "loras" / "team" / "sql")
    write_adapter(tmp_path / "loras" / "wide", rank=9)
    write_adapter(tmp_path / "outside")
    client = lora_client()
    client.adapters.resolver_dir = tmp_path / "loras"
    for name in ("sql", "team/sql"):
        assert post(client, "/v1/completions", {"model": name, "prompt": "x"}).status_code == 200
    assert set(client.adapters.named) == {"sql", "team/sql"}
    for name in ("other", "../outside", "team/../../outside", str(tmp_path / "outside"), "./sql", "sql\0"):
        assert post(client, "/v1/completions", {"model": name, "prompt": "x"}).status_code == 404
    assert post(client, "/v1/completions", {"model": "wide", "prompt": "x"}).status_code == 400
    assert set(client.adapters.named) == {"sql", "team/sql"}
