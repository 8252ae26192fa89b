"""tcp addresses: clients with the right keys connect, others do not, and clients of this machine need none."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from octavo.protocol.channel import FrontendRouter
from octavo.protocol.codec import event_codec, request_codec
from octavo.protocol.curve import (
    ClientKeys,
    check_remote,
    is_loopback,
    prepare_connection,
    read_client_keys,
    read_engine_keys,
    write_pair,
)
from octavo.protocol.errors import ConfigError, StartupError
from octavo.protocol.events import EngineDying
from octavo.protocol.requests import Abort

_opened: list[object] = []
"""Sockets of the running test, kept from the garbage collector until their context closes them."""

TIMEOUT_MS = 60_000
SILENCE_MS = 500


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)
    _opened.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a directory with the keys of an engine, of a client that it knows, and of one that it does not know."""
    (tmp_path / "clients").mkdir()
    write_pair(tmp_path, "engine")
    write_pair(tmp_path, "stranger")
    public, _ = write_pair(tmp_path, "friend")
    public.rename(tmp_path / "clients" / public.name)
    return tmp_path


def keys_of(folder: Path, name: str, engine: str = "engine") -> ClientKeys:
    keys = read_client_keys(str(folder / f"{name}.key_secret"), str(folder / f"{engine}.key"))
    assert keys is not None
    return keys


def new_router(context: zmq.Context, folder: Path, name: str = "core") -> FrontendRouter:
    router = FrontendRouter(context, f"ipc://{folder}/{name}")
    _opened.append(router)
    return router


def open_router(context: zmq.Context, folder: Path, port: int, has_keys: bool = True) -> FrontendRouter:
    router = new_router(context, folder)
    keys = read_engine_keys(str(folder / "engine.key_secret"), str(folder / "clients")) if has_keys else None
    router.listen_remotely(f"tcp://127.0.0.1:{port}", keys)
    return router


def connect(context: zmq.Context, address: str, keys: ClientKeys | None) -> zmq.Socket:
    dealer = context.socket(zmq.DEALER)
    _opened.append(dealer)
    prepare_connection(dealer, address, keys)
    dealer.connect(address)
    with contextlib.suppress(zmq.Again):  # refused already: libzmq has dropped the connection
        dealer.send_multipart(request_codec().encode(Abort(["a"])), zmq.DONTWAIT)
    return dealer


def is_heard(router: FrontendRouter, dealer: zmq.Socket, timeout_ms: int) -> bool:
    """Return whether a message arrives in time; if so, check that the reply arrives too."""
    if not router.socket.poll(timeout_ms):
        return False
    ((peer, request),) = router.receive()
    assert request == Abort(["a"])
    assert router.send(peer, EngineDying("hello"))
    assert dealer.poll(TIMEOUT_MS)
    return event_codec().decode(dealer.recv()) == EngineDying("hello")


def test_the_right_keys_open_and_ipc_needs_none(context: zmq.Context, folder: Path, free_port: int) -> None:
    router = open_router(context, folder, free_port)
    for address, keys in ((f"tcp://127.0.0.1:{free_port}", keys_of(folder, "friend")), (router.address, None)):
        assert is_heard(router, connect(context, address, keys), TIMEOUT_MS)


@pytest.mark.parametrize(("name", "engine"), [("stranger", "engine"), ("friend", "stranger"), (None, "")])
def test_no_other_keys_do(context: zmq.Context, folder: Path, free_port: int, name: str | None, engine: str) -> None:
    router = open_router(context, folder, free_port)
    keys = None if name is None else keys_of(folder, name, engine)
    assert not is_heard(router, connect(context, f"tcp://127.0.0.1:{free_port}", keys), SILENCE_MS)
    friend = connect(context, f"tcp://127.0.0.1:{free_port}", keys_of(folder, "friend"))
    assert is_heard(router, friend, TIMEOUT_MS), "clients with the right keys still connect"


def test_the_own_machine_may_do_without(context: zmq.Context, folder: Path, free_port: int) -> None:
    router = open_router(context, folder, free_port, has_keys=False)
    assert is_heard(router, connect(context, f"tcp://127.0.0.1:{free_port}", None), TIMEOUT_MS)


@pytest.mark.parametrize(
    ("address", "is_own"),
    [
        ("tcp://127.0.0.1:5555", True),
        ("tcp://[::1]:5555", True),
        ("tcp://localhost:5555", True),
        ("tcp://127.1.2.3:5555", True),
        ("tcp://0.0.0.0:5555", False),
        ("tcp://*:5555", False),
        ("tcp://[::]:5555", False),
        ("tcp://192.0.2.1:5555", False),
        ("tcp://example.org:5555", False),
        ("tcp://127.0.0.1.example.org:5555", False),
        ("tcp://localhost.example.org:5555", False),
        ("tcp://192.0.2.1:0;127.0.0.1:5555", False),
    ],
)
def test_which_addresses_need_keys(context: zmq.Context, tmp_path: Path, address: str, is_own: bool) -> None:
    assert is_loopback(address) == is_own
    check_remote(address, has_keys=True)
    if not is_own:
        router = new_router(context, tmp_path)
        with pytest.raises(ConfigError, match="needs keys"):
            router.listen_remotely(address, None)
        with pytest.raises(ConfigError, match="needs keys"):
            prepare_connection(router.socket, address, None)


def test_a_secret_that_others_may_read_is_none(folder: Path) -> None:
    (folder / "engine.key_secret").chmod(0o640)
    with pytest.raises(ConfigError, match="others may read") as caught:
        read_engine_keys(str(folder / "engine.key_secret"), str(folder / "clients"))
    assert "chmod 600" in caught.value.hint


def test_files_that_are_no_keys(folder: Path) -> None:
    with pytest.raises(ConfigError, match="holds no secret key"):
        read_engine_keys(str(folder / "engine.key"), str(folder / "clients"))
    with pytest.raises(ConfigError, match="cannot read the key"):
        read_client_keys(str(folder / "friend.key_secret"), str(folder / "nobody.key"))
    for text in ("~" * 40, "%" * 40, "\u00e9" * 40):  # no Z85, a number above 32 bits, no ASCII
        (folder / "other.key_secret").write_text(f'public-key = "{text}"\nsecret-key = "{text}"\n')
        (folder / "other.key_secret").chmod(0o600)
        with pytest.raises(ConfigError, match="holds no secret key"):
            read_client_keys(str(folder / "other.key_secret"), str(folder / "engine.key"))
        with pytest.raises(ConfigError, match="holds no public key"):
            read_engine_keys(str(folder / "engine.key_secret"), str(folder / "other.key_secret"))
    (folder / "empty").mkdir()
    with pytest.raises(ConfigError, match="no client has a public key"):
        read_engine_keys(str(folder / "engine.key_secret"), str(folder / "empty"))


def test_new_keys_replace_no_old_ones(folder: Path) -> None:
    before = (folder / "engine.key_secret").read_bytes()
    with pytest.raises(ConfigError, match="already exists"):
        write_pair(folder, "engine")
    assert (folder / "engine.key_secret").read_bytes() == before
    assert (folder / "engine.key_secret").stat().st_mode & 0o777 == 0o600


def test_an_address_that_is_taken_is_a_clear_error(context: zmq.Context, folder: Path, free_port: int) -> None:
    open_router(context, folder, free_port)
    other = new_router(context, folder, "other")
    with pytest.raises(StartupError, match=r"cannot bind tcp://127\.0\.0\.1"):
        other.listen_remotely(f"tcp://127.0.0.1:{free_port}", None)


def test_a_client_names_both_keys_or_none() -> None:
    assert read_client_keys(None, None) is None
    for files in (("x", None), (None, "x")):
        with pytest.raises(ConfigError, match="given together"):
            read_client_keys(*files)
