"""A connector that stores contents in memory, and an engine that uses it."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from core_fakes import FakeEngine
from source_tree import ROOT
from waiting import wait_until

from octavo.core_proc.transfer.plugin import PluginConnector
from octavo.protocol.config.kv_transfer import ResolvedKVConnector
from octavo.protocol.kv_connector import (
    ConnectorRequest,
    KVBlock,
    KVConnectorBase,
    KVConnectorConfig,
    KVConnectorRole,
)
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit


class Memory(KVConnectorBase):
    """Stores contents in a dictionary."""

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
        num_found, first = 0, num_computed_tokens // self.config.block_size
        for index, keys in enumerate(request.block_keys[first:], first):
            if any(key not in self.contents for key in keys):
                break
            if not request.state_keys or request.state_keys[index] in self.contents:
                num_found = index + 1 - first
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


def documented_connector(folder: Path, role: str = "kv_both") -> dict[str, Any]:
    """Return the `kv_transfer_config` of the connector in the documentation, which stores contents in a folder."""
    text = (ROOT / "docs" / "kv-connectors.md").read_text()
    (example,) = re.findall(r"^```python connector\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (module := folder / "folder_connector.py").write_text(example)
    return {
        "kv_connector": "FolderConnector",
        "kv_connector_module_path": str(module),
        "kv_role": role,
        "kv_connector_extra_config": {"folder": str(folder / "blocks")},
    }


def memory(block_size: int = 4) -> Memory:
    return Memory(KVConnectorConfig({}, block_size, 1, -1), KVConnectorRole.SCHEDULER)


def engine_with(plugin: Memory, **fields: Any) -> tuple[FakeEngine, PluginConnector]:
    setting = ResolvedKVConnector(name="Memory", module_path="", role="kv_both")
    engine = FakeEngine(16, kv_connector=setting)
    return engine, PluginConnector(plugin, engine.scheduler, "here", **{"loads": True, "timeout_s": 60.0, **fields})


def submit_of(request_id: str, prompt: list[int], **fields: Any) -> Submit:
    return Submit(request_id, prompt, SamplingSpec(max_tokens=4, seed=0), **fields)


def wait_ready(connector: PluginConnector) -> list[tuple[bytes, Submit]]:
    ready: list[tuple[bytes, Submit]] = []
    wait_until(lambda: bool(ready.extend(connector.take_ready()) or ready))
    return ready
