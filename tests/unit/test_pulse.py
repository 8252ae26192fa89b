"""The pulse file: what the core writes is what frontends read."""

import subprocess
import sys
import time
from pathlib import Path

from waiting import read_line

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


def test_flags_of_the_pulse_are_read_beside_its_beats(tmp_path: Path) -> None:
    writer, reader = PulseWriter(tmp_path / "pulse"), PulseReader(tmp_path / "pulse")
    seen = [reader.read()]
    for note in (
        writer.note_progress,
        lambda: writer.note_isolation(is_isolating=True),
        lambda: writer.beat(has_work=True),
    ):
        note()
        seen.append(reader.read())
    writer.note_isolation(is_isolating=False)
    seen.append(reader.read())
    assert [(pulse.has_progressed, pulse.is_isolating, pulse.has_work) for pulse in seen] == [
        (False, False, False), (True, False, False), (True, True, False), (True, True, True), (True, False, True),
    ]  # fmt: skip
    writer.close(), reader.close()


def test_a_beat_is_never_half_written(tmp_path: Path) -> None:
    """`struct.pack_into` clears the place that it writes to, which a reader in another process can see."""
    beating = f"""if True:
        from pathlib import Path
        from octavo.protocol.pulse import PulseWriter
        writer = PulseWriter(Path({str(tmp_path / "pulse")!r}))
        writer.beat(has_work=True)
        print("ready", flush=True)
        while True:
            writer.beat(has_work=True)
    """
    with subprocess.Popen([sys.executable, "-P", "-c", beating], stdout=subprocess.PIPE) as other:
        try:
            assert read_line(other.stdout) == b"ready\n"
            reader = PulseReader(tmp_path / "pulse")
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline:
                assert reader.read().age_s < 60
            reader.close()
        finally:
            other.kill()


def test_only_a_busy_core_can_stall() -> None:
    assert Pulse(age_s=100, has_work=True).is_stalled(30)
    assert not Pulse(age_s=10, has_work=True).is_stalled(30)
    assert not Pulse(age_s=100, has_work=False).is_stalled(30)
