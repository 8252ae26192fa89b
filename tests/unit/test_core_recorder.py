"""Recordings: written by an observer, replayed, and compared after a change of the scheduler."""

import itertools
import os
import subprocess
from pathlib import Path

import pytest
from core_fakes import CLIENT, FakeEngine, cache_plan, core_config
from simulation.worker import SimulatedWorker
from source_tree import ROOT

from octavo.core_proc.cache.exchange import contents_to_offer
from octavo.core_proc.log_entries import CacheReset, Ended, Planned
from octavo.core_proc.recorder import Recorder, read_recording, replay
from octavo.core_proc.replay import main
from octavo.core_proc.scheduler.observed import ObservedScheduler
from octavo.protocol.errors import ConfigError, ProtocolError
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A recording of a crowded little engine: preemption, an abort, a cache reset."""
    path = tmp_path / "steps"
    config = core_config(max_model_len=36)
    plan = cache_plan(config, num_blocks=9)
    recorder = Recorder(path, config, plan)
    scheduler = ObservedScheduler(config, plan, itertools.count().__next__, [recorder])
    worker = SimulatedWorker(config, 9)
    for index in range(4):
        scheduler.submit(CLIENT, Submit(str(index), pack_ids([index + 1] * 8), SamplingSpec(max_tokens=12, seed=index)))
    scheduler.reset_prefix_cache()
    while (step := scheduler.plan()) is not None:
        if step.sequence == 6:
            scheduler.abort(CLIENT, ["2"])
        scheduler.commit(worker.execute(step))
    assert scheduler.counters.num_preemptions
    assert scheduler.plan() is None
    recorder.close()
    return path


def test_a_recording_contains_requests_that_were_ended_from_outside(tmp_path: Path):
    path = tmp_path / "steps"
    config = core_config()
    recorder = Recorder(path, config, cache_plan(config))
    scheduler = ObservedScheduler(config, cache_plan(config), itertools.count().__next__, [recorder])
    worker = SimulatedWorker(config, 64)
    for name in "abc":
        scheduler.submit(CLIENT, Submit(name, pack_ids([ord(name) % 50] * 8), SamplingSpec(max_tokens=9, seed=1)))
    while (step := scheduler.plan()) is not None:
        scheduler.commit(worker.execute(step))
        if step.sequence == 2:
            scheduler.conclude(scheduler.requests[CLIENT, "a"])
        if step.sequence == 3:
            scheduler.reject(scheduler.requests[CLIENT, "b"], "why", "field")
    recorder.close()
    assert sum(isinstance(entry, Ended) for entry in read_recording(path)) == 2
    assert replay(read_recording(path)).is_identical


def test_blocks_of_another_engine_are_in_a_recording(tmp_path: Path):
    config = core_config()
    prompt = Submit("a", pack_ids([1] * 30), SamplingSpec(max_tokens=2, seed=1))
    giver = FakeEngine()
    giver.submit("a", [1] * 30, 40)
    giver.plan()
    (request,) = giver.scheduler.running
    keys = [key for key, _ in contents_to_offer(giver.scheduler.cache, request).blocks]
    recorder = Recorder(tmp_path / "steps", config, cache_plan(config))
    scheduler = ObservedScheduler(config, cache_plan(config), itertools.count().__next__, [recorder])
    assert len(scheduler.take_blocks(CLIENT, prompt, keys).blocks) == 7
    scheduler.submit(CLIENT, prompt)
    step = scheduler.plan()
    assert step is not None and [part.start for part in step.scheduled] == [28]
    recorder.close()
    assert replay(read_recording(tmp_path / "steps")).is_identical


def test_a_recording_replays_identically(recording: Path):
    result = replay(read_recording(recording))
    assert result.is_identical
    assert result.num_plans == sum(
        isinstance(entry, Planned) and entry.plan is not None for entry in read_recording(recording)
    )


def test_the_first_plan_that_differs_is_found(recording: Path):
    entries = [entry for entry in read_recording(recording) if not isinstance(entry, CacheReset)]
    index = next(i for i, e in enumerate(entries) if isinstance(e, Planned) and e.plan and e.plan.sequence == 3)
    plan = entries[index].plan
    entries[index] = Planned(type(plan)(plan.sequence, [7], plan.admitted, plan.appended, plan.scheduled))
    result = replay(iter(entries))
    assert (result.is_identical, result.num_plans) == (False, 4)
    assert result.recorded.released == [7]
    assert result.replayed == plan


def test_a_recording_cut_short_is_read_up_to_there(recording: Path):
    whole = list(read_recording(recording))
    recording.write_bytes(recording.read_bytes()[:-3])
    assert list(read_recording(recording)) == whole[:-1]


def test_something_else_is_rejected(tmp_path: Path):
    path = tmp_path / "other"
    path.write_bytes(b"\x03\x00\x00\x00abc")
    with pytest.raises(ProtocolError, match="not a recording"):
        replay(read_recording(path))
    path.write_bytes(b"")
    with pytest.raises(ProtocolError, match="first entry"):
        replay(read_recording(path))


def test_a_file_that_cannot_be_written_is_a_configuration_error(tmp_path: Path):
    config = core_config()
    with pytest.raises(ConfigError, match="cannot record"):
        Recorder(tmp_path / "no" / "folder", config, cache_plan(config))


def test_a_disk_that_is_full_from_the_start_is_a_configuration_error():
    config = core_config()
    with pytest.raises(ConfigError, match="No space left"):
        Recorder(Path("/dev/full"), config, cache_plan(config))


@pytest.mark.parametrize("num_written", [0, 500], ids=["when it is closed", "while it is written"])
def test_a_disk_that_fills_ends_the_recording_and_nothing_else(tmp_path: Path, caplog, num_written: int):
    path = tmp_path / "steps"
    config = core_config()
    plan = cache_plan(config)
    recorder = Recorder(path, config, plan)
    scheduler = ObservedScheduler(config, plan, itertools.count().__next__, [recorder])
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), recorder._file.fileno())
    for index in range(1 + num_written):
        scheduler.submit(CLIENT, Submit(str(index), pack_ids([1] * 8), SamplingSpec(max_tokens=2, seed=0)))
    assert scheduler.plan() is not None
    recorder.close()
    (line,) = [record.message for record in caplog.records if "recording" in record.message]
    assert str(path) in line and "No space left" in line
    assert len(list(read_recording(path))) == 1, "what was written before can be read"


def test_the_program_says_what_it_found(recording: Path, tmp_path: Path, capsys):
    assert main([str(recording)]) == 0
    assert capsys.readouterr().out.endswith(" plans identical\n")
    assert main([str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err


def test_the_script_runs(recording: Path):
    done = subprocess.run([ROOT / "scripts/replay", recording], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
