"""Files of blocks go from engine to engine: by another name on one machine, through a socket otherwise."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from select import select

import pytest
import zmq
from waiting import wait_until

from octavo.core_proc.transfer import puller as pulling
from octavo.core_proc.transfer.offers import Offer, Offers
from octavo.core_proc.transfer.puller import Pulled, Puller
from octavo.core_proc.transfer.server import TransferServer
from octavo.core_proc.transfer.sockets import local_address, remove_dead_sockets, socket_directory
from octavo.protocol.curve import Authenticator, GroupKeys
from octavo.protocol.errors import StartupError
from octavo.protocol.kv_transfer import KVTransfer, Part, rank_file

NAME, PRINT, ENGINE = "0a" * 16, "print", "engine"
NUM_RANKS = 2


@dataclass
class Pair:
    """An engine that gives and one that takes."""

    folder: Path
    server_context: "zmq.Context[zmq.Socket[bytes]]"
    client_context: "zmq.Context[zmq.Socket[bytes]]"
    offers: Offers
    server: TransferServer
    puller: Puller

    def offer(self, size: int = 10_000, *, keep_s: float = 60.0, is_written: bool = True) -> Offer:
        path = str(self.folder / "given" / "out")
        for rank in range(NUM_RANKS):
            Path(rank_file(path, rank)).write_bytes(bytes([rank]) * size)
        offer = Offer(NAME, PRINT, [b"k" * 32], path, NUM_RANKS * size, time.monotonic() + keep_s, is_written)
        self.offers.add(offer)
        return offer

    def pull(self, *, remote: bool = False, fingerprint: str = PRINT) -> Pulled:
        host, port = ("127.0.0.1", self.server.port) if remote else ("", 0)
        self.puller.start(KVTransfer(False, True, ENGINE, NAME, host, port), fingerprint)
        return self.wait()

    def wait(self) -> Pulled:
        assert select([self.puller.wake_fd], [], [], 20)[0], "the pull does not end"
        (pulled,) = self.puller.take_done()
        return pulled

    def contents(self, pulled: Pulled) -> list[bytes]:
        return [Path(rank_file(pulled.path, rank)).read_bytes() for rank in range(NUM_RANKS)]

    def kill_server(self) -> None:
        if not self.server_context.closed:
            self.server.close()
            self.server_context.term()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    for name in ("sockets", "given", "taken"):
        (tmp_path / name).mkdir()
    group = GroupKeys.create()
    one: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    two: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    Authenticator(one, group.server.clients)
    offers = Offers(NUM_RANKS, 10**8)
    addresses = [local_address(tmp_path / "sockets", ENGINE), "tcp://127.0.0.1:*"]
    server = TransferServer(one, addresses, group.server, offers, is_replacement=False)
    puller = Puller(two, tmp_path / "sockets", tmp_path / "taken", NUM_RANKS, group.client, 5.0)
    made = Pair(tmp_path, one, two, offers, server, puller)
    yield made
    two.term()
    puller.close()
    made.kill_server()


def wait_until_taken(pair: Pair) -> None:
    wait_until(lambda: not len(pair.offers) and not list((pair.folder / "given").iterdir()))


@pytest.mark.parametrize("size", [0, 10_000, 9 * 2**20 + 5])
@pytest.mark.parametrize("way", ["link", "ipc", "tcp"])
def test_files_arrive_whole_and_are_given_once(
    pair: Pair, way: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "ipc":  # as between file systems
        monkeypatch.setattr(pulling, "_link", lambda source, target, size: False)
    pair.offer(size)
    pulled = pair.pull(remote=way == "tcp")
    assert (pulled.fault, pulled.keys, pulled.fingerprint) == ("", [b"k" * 32], PRINT)
    assert pair.contents(pulled) == [bytes([rank]) * size for rank in range(NUM_RANKS)]
    wait_until_taken(pair)
    assert "are gone" in pair.pull().fault
    pair.puller.remove_files(pulled.path)
    assert not list((pair.folder / "taken").iterdir())


def test_a_pull_waits_until_the_files_are_written(pair: Pair) -> None:
    offer = pair.offer(is_written=False)
    pair.puller.start(KVTransfer(False, True, ENGINE, NAME), PRINT)
    assert not select([pair.puller.wake_fd], [], [], 0.05)[0]
    offer.is_written = True
    pair.server.wake()
    assert pair.wait().fault == ""


def test_what_could_not_be_written_is_not_waited_for(pair: Pair) -> None:
    pair.offer(is_written=False)
    pair.puller.start(KVTransfer(False, True, ENGINE, NAME), PRINT)
    pair.offers.drop(NAME)
    pair.server.wake()
    assert "are gone" in pair.wait().fault


def test_other_engines_get_nothing(pair: Pair) -> None:
    pair.offer()
    assert "other weights, data types or sharding" in pair.pull(fingerprint="other").fault
    assert len(pair.offers) == 1


def test_what_nobody_takes_is_dropped(pair: Pair) -> None:
    pair.offer(keep_s=0.0)
    pair.offers.expire()
    assert not len(pair.offers) and not list((pair.folder / "given").iterdir())
    assert "are gone" in pair.pull().fault


def test_offers_are_bounded() -> None:
    offers = Offers(1, max_bytes=100)
    offers.add(Offer("a", PRINT, [], "/nowhere/a", 60, time.monotonic() + 60))
    assert offers.has_room(40) and not offers.has_room(41)
    offers.drop("a")
    assert offers.has_room(100)


def test_a_silent_engine_is_waited_for_once(pair: Pair) -> None:
    pair.offer(is_written=False)
    pair.puller._timeout_s = 0.05
    assert "is silent" in pair.pull().fault
    assert "was silent lately" in pair.pull().fault
    pair.puller._silent.clear()
    pair.puller._timeout_s = 5.0
    pair.offers.drop(NAME)
    pair.offer()
    assert pair.pull().fault == ""


@pytest.mark.parametrize("remote", [False, True])
def test_an_engine_that_is_gone_is_not_waited_for(pair: Pair, remote: bool) -> None:
    pair.offer()
    port = pair.server.port
    pair.kill_server()
    host = "127.0.0.1" if remote else ""
    pair.puller.start(KVTransfer(False, True, ENGINE, NAME, host, port if remote else 0), PRINT)
    assert "is gone" in pair.wait().fault


def test_an_engine_that_dies_in_the_middle_leaves_no_files(pair: Pair) -> None:
    pair.offer(is_written=False)
    pair.puller.start(KVTransfer(False, True, ENGINE, NAME, "127.0.0.1", pair.server.port), PRINT)
    assert not select([pair.puller.wake_fd], [], [], 0.05)[0]
    pair.kill_server()
    assert "is gone" in pair.wait().fault
    assert not list((pair.folder / "taken").iterdir())


def test_a_damaged_part_is_noticed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = pair.server._encode
    monkeypatch.setattr(pair.server, "_part", lambda read: [encode(Part("", 7)), bytes(read.num_bytes)])
    pair.offer()
    assert "damaged" in pair.pull(remote=True).fault
    assert not list((pair.folder / "taken").iterdir())


def test_a_stranger_is_not_served(pair: Pair) -> None:
    pair.offer()
    pair.puller._keys = GroupKeys.create().client
    assert "gone" in pair.pull(remote=True).fault or "silent" in pair.pull(remote=True).fault
    assert len(pair.offers) == 1


def test_other_machines_need_keys(pair: Pair) -> None:
    pair.puller._keys = None
    pair.puller.start(KVTransfer(False, True, ENGINE, NAME, "10.0.0.1", 5), PRINT)
    assert "needs keys" in pair.wait().fault


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    path = socket_directory(tmp_path)
    assert path.stat().st_mode & 0o077 == 0
    path.chmod(0o755)
    with pytest.raises(StartupError, match="others may use it"):
        socket_directory(tmp_path)


def test_dead_sockets_are_removed(pair: Pair) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as dead:
        dead.bind(local_address(pair.folder / "sockets", "dead"))
        os.link(pair.folder / "sockets" / "dead", pair.folder / "sockets" / "left")
    remove_dead_sockets(pair.folder / "sockets")
    assert [path.name for path in (pair.folder / "sockets").iterdir()] == [ENGINE]
