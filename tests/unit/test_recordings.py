"""Recordings that an earlier release has made replay to the same plans.

The files under `tests/recordings` are what `--record-steps` wrote in protocol version 2, of simulated engines with
random requests: chunked prompts, prefix hits, priorities, preemption, masks, lost workers, requests in isolation.
"""

import lzma
from pathlib import Path

import convert_recording
import msgspec
import pytest
from source_tree import ROOT

from octavo.core_proc.log_entries import Opened, Planned, Restricted, WorkersLost
from octavo.core_proc.recorder import read_recording, replay
from octavo.protocol.errors import ProtocolError

RECORDINGS = sorted((ROOT / "tests" / "recordings").glob("*.v2.xz"))


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_a_recording_of_version_2_replays_identically(path: Path, tmp_path: Path) -> None:
    converted = tmp_path / "steps"
    converted.write_bytes(convert_recording.convert(lzma.decompress(path.read_bytes())))
    result = replay(read_recording(converted))
    assert result.is_identical, f"plan {result.num_plans}: {result.recorded} became {result.replayed}"
    assert result.num_plans > 100


def test_together_they_show_what_a_scheduler_does(tmp_path: Path) -> None:
    seen = set()
    for path in RECORDINGS:
        (tmp_path / "steps").write_bytes(convert_recording.convert(lzma.decompress(path.read_bytes())))
        admitted: set[str] = set()
        for entry in read_recording(tmp_path / "steps"):
            seen.add(type(entry))
            if isinstance(entry, Opened):
                seen.add(entry.config.scheduling_policy)
            if isinstance(entry, Planned) and entry.plan is not None:
                seen |= {"masks"} if entry.plan.awaits_masks else set()
                names = {one.request_id for one in entry.plan.admitted}
                seen |= {"preempted"} if names & admitted else set()
                admitted |= names
                seen |= {"chunked"} if any(one.start and one.num_tokens > 1 for one in entry.plan.scheduled) else set()
    assert seen >= {"masks", "preempted", "chunked", "fcfs", "priority", WorkersLost, Restricted}


def test_an_old_recording_is_rejected_with_the_way_to_read_it(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    path.write_bytes(lzma.decompress(RECORDINGS[0].read_bytes()))
    with pytest.raises(ProtocolError, match="scripts/convert_recording"):
        list(read_recording(path))


def test_a_recording_of_another_version_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    path.write_bytes(convert_recording.convert(lzma.decompress(RECORDINGS[0].read_bytes())))
    opened, *entries = read_recording(path)
    with pytest.raises(ProtocolError, match="protocol version 99"):
        replay(iter([msgspec.structs.replace(opened, version=99), *entries]))


def test_the_program_converts_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(lzma.decompress(RECORDINGS[0].read_bytes())[:-3])
    assert convert_recording.main([str(old), str(new)]) == 0
    assert len(list(read_recording(new))) > 100, "an entry that was cut short is left out"
    old.write_bytes(b"\x03\x00\x00\x00abc")
    assert convert_recording.main([str(old), str(new)]) == 1
    assert "cannot convert" in capsys.readouterr().err
