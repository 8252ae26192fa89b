"""An engine's private directory: fresh, private, and removed after its owner has died."""

import fcntl
import socket
from pathlib import Path

import pytest

from octavo.frontend.run_dir import RunDir, sweep
from octavo.frontend.spawn import remove_socket


def test_a_directory_is_fresh_and_private(tmp_path: Path) -> None:
    first, second = RunDir(tmp_path), RunDir(tmp_path)
    assert first.path != second.path
    assert first.path.stat().st_mode & 0o777 == 0o700
    first.remove()
    second.remove()
    assert list(tmp_path.iterdir()) == []


def test_removing_twice_is_harmless(tmp_path: Path) -> None:
    directory = RunDir(tmp_path)
    directory.remove()
    directory.remove()
    assert not directory.path.exists()


def test_only_abandoned_directories_are_swept(tmp_path: Path) -> None:
    held = RunDir(tmp_path)
    (tmp_path / "octavo-abandoned").mkdir()
    (tmp_path / "octavo-abandoned" / "owner.lock").touch()
    (tmp_path / "octavo-abandoned" / "core").touch()
    (tmp_path / "octavo-foreign").mkdir()
    (tmp_path / "other").mkdir()
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([held.path.name, "octavo-foreign", "other"])
    held.remove()


def test_a_directory_in_the_making_is_not_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, sweeping = fcntl.flock, True

    def flock_late(fd: int, operation: int) -> None:
        nonlocal sweeping
        if sweeping:  # another engine starts at the worst moment
            sweeping = False
            sweep(tmp_path)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    directory = RunDir(tmp_path)
    assert directory.path.is_dir()
    sweep(tmp_path)
    assert directory.path.is_dir()
    directory.remove()


def test_the_socket_of_another_engine_is_left_alone(tmp_path: Path) -> None:
    """A start that failed because somebody listens there must not take the address away from them."""
    path, pointer = tmp_path / "core", tmp_path / "pointer"
    pointer.symlink_to(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        remove_socket(path)
        remove_socket(pointer)
        assert path.is_socket()
        assert pointer.is_symlink()
    remove_socket(pointer)
    remove_socket(path)
    assert not path.exists()
    assert not pointer.is_symlink()
