"""The bytes of every message: the wire changes with `PROTOCOL_VERSION` or not at all."""

import json
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import wire_golden
from wire_samples import MESSAGES

from octavo.protocol import PROTOCOL_VERSION
from octavo.protocol.events import Event, StepEvent, Tokens, UtilityResult
from octavo.protocol.params import RequestParams
from octavo.protocol.requests import FrontendMessage, Utility
from octavo.protocol.worker_commands import WorkerCommand, WorkerReply

GOLDEN = json.loads(wire_golden.PATH.read_text())
REMEDY = "the wire has changed: raise PROTOCOL_VERSION, say so in CHANGELOG.md, and run scripts/wire_golden"


@pytest.mark.parametrize("sample", wire_golden.sample_bytes(), ids=lambda sample: sample["message"])
def test_the_bytes_of_a_message_are_those_of_its_version(sample: dict) -> None:
    assert GOLDEN["version"] == PROTOCOL_VERSION, "run scripts/wire_golden"
    assert sample in GOLDEN["messages"], REMEDY


def test_no_message_has_gone() -> None:
    assert GOLDEN["messages"] == wire_golden.sample_bytes(), REMEDY


def test_there_is_a_sample_of_every_message() -> None:
    sampled = {type(part) for _, message in MESSAGES for part in parts(message)}
    unions = (FrontendMessage, Event, StepEvent, WorkerCommand, WorkerReply, Utility, UtilityResult, RequestParams)
    assert {kind for union in unions for kind in get_args(union)} - sampled == set()
    assert Tokens in sampled


def parts(value: object) -> list[object]:
    """A message and all messages inside."""
    inner = [getattr(value, name) for name in value.__struct_fields__] if isinstance(value, msgspec.Struct) else value
    return [value, *(part for one in inner for part in parts(one))] if isinstance(inner, list) else [value]


def test_changed_bytes_need_another_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wire.json"
    assert wire_golden.main([], path) == 0
    golden = json.loads(path.read_text())
    golden["messages"][3]["body"] += "00"
    path.write_text(json.dumps(golden))
    assert wire_golden.main([], path) == 1
    assert "Raise PROTOCOL_VERSION" in capsys.readouterr().err
    assert wire_golden.main(["--same-version"], path) == 0
    assert json.loads(path.read_text()) == GOLDEN
