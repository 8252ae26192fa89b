"""The pulse file: what the core writes is what frontends read."""

from pathlib import Path

from octavo.protocol.pulse import Pulse, PulseReader, PulseWriter


def test_a_beat_is_seen_by_a_reader(tmp_path: Path) -> None:
    writer = PulseWriter(tmp_path / "pulse")
    reader = PulseReader(tmp_path / "pulse")
    assert not reader.read().has_work
    writer.beat(has_work=True)
    pulse = reader.read()
    assert pulse.has_work
    assert 0 <= pulse.age_s < 60
    reader.close()
    writer.close()


def test_only_a_busy_core_can_stall() -> None:
    assert Pulse(age_s=100, has_work=True).is_stalled(30)
    assert not Pulse(age_s=10, has_work=True).is_stalled(30)
    assert not Pulse(age_s=100, has_work=False).is_stalled(30)
