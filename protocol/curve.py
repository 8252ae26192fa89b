"""Keys for `tcp://` addresses: engine and clients authenticate each other by public keys.

The cryptography is CurveZMQ (http://curvezmq.org), which is part of libzmq. Key files have the format of its tools.
`ipc://` needs no keys: file permissions decide who may connect.
"""

import ipaddress
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.utils.z85

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import ConfigError

HEARTBEAT_S = 5
"""Seconds between heartbeats on a tcp connection."""

HEARTBEAT_TIMEOUT_S = 15
"""Seconds without a heartbeat after which a peer counts as dead: a machine that loses power closes no connection."""

HANDSHAKE_TIMEOUT_S = 10
"""Seconds within which a client must authenticate."""

PUBLIC_SUFFIX = ".key"
SECRET_SUFFIX = ".key_secret"

_PUBLIC_KEY = re.compile(r'^\s*public-key\s*=\s*"([^"\s]{40})"\s*$', re.MULTILINE)
_SECRET_KEY = re.compile(r'^\s*secret-key\s*=\s*"([^"\s]{40})"\s*$', re.MULTILINE)

_ZAP_ADDRESS = "inproc://zeromq.zap.01"
"""Where libzmq asks whether a client may connect; https://rfc.zeromq.org/spec/27."""


@dataclass(frozen=True)
class EngineKeys:
    """What an engine needs to authenticate its clients."""

    secret: bytes
    clients: frozenset[bytes]
    """Public keys of the clients that may connect."""


@dataclass(frozen=True)
class ClientKeys:
    """What a client needs to authenticate itself and its engine."""

    public: bytes
    secret: bytes
    engine: bytes
    """Public key of the engine."""


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach a `tcp://` address."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_remote(address: str, has_keys: bool) -> None:
    """Reject a `tcp://` address to which anybody could connect.

    Raises:
        ConfigError: there are no keys, and the address is reachable from other machines.
    """
    if not (has_keys or is_loopback(address)):
        raise ConfigError(
            f"{address} is reachable from other machines and needs keys",
            hint="create them with octavo keygen (docs/remote.md), or use an ipc:// or tcp://127.0.0.1 address",
        )


def write_pair(directory: Path, name: str) -> tuple[Path, Path]:
    """Create a new key pair. Return the files of the public and of the secret key.

    Raises:
        ConfigError: a file exists already, or cannot be written.
    """
    public, secret = (key.decode() for key in zmq.curve_keypair())
    lines = f'metadata\ncurve\n    public-key = "{public}"\n'
    paths = (directory / f"{name}{PUBLIC_SUFFIX}", directory / f"{name}{SECRET_SUFFIX}")
    texts = (lines, f'{lines}    secret-key = "{secret}"\n')
    try:
        if existing := [path for path in paths if path.exists()]:
            raise FileExistsError(f"{existing[0]} already exists")
        for path, text, mode in zip(paths, texts, (0o644, 0o600), strict=True):
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write keys: {error}", hint="choose another name") from None
    return paths


def read_engine_keys(secret_file: str, clients_path: str) -> EngineKeys:
    """Read the keys of an engine and of its clients.

    Args:
        secret_file: file with the engine's secret key.
        clients_path: file with one client's public key, or a directory of such files.

    Raises:
        ConfigError: a file is missing or not a key file, others may read the secret one, or there is no client.
    """
    path = Path(clients_path)
    files = sorted(path.glob(f"*{PUBLIC_SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"no client has a public key (*{PUBLIC_SUFFIX}) in {clients_path}")
    return EngineKeys(_read_secret(secret_file), frozenset(_read_key(file, _PUBLIC_KEY) for file in files))


def read_keys_of_engine(config: ResolvedConfig) -> EngineKeys | None:
    """Read the keys named in the configuration. Return None if it names none.

    Raises:
        ConfigError: see `read_engine_keys`.
    """
    remote = config.remote
    if remote.engine_secret_key_file is None or remote.engine_authorized_clients is None:
        return None
    return read_engine_keys(remote.engine_secret_key_file, remote.engine_authorized_clients)


def read_client_keys(secret_file: str | None, engine_file: str | None) -> ClientKeys | None:
    """Read the keys of a client and the public key of its engine. Return None if neither file is given.

    Raises:
        ConfigError: only one is given, a file is missing or not a key file, or others may read the secret one.
    """
    if not (secret_file or engine_file):
        return None
    if not (secret_file and engine_file):
        raise ConfigError(
            "client_secret_key_file and engine_public_key_file must be given together",
            hint="give both, or neither for an engine on this machine",
        )
    secret = _read_secret(secret_file)
    return ClientKeys(zmq.curve_public(secret), secret, _read_key(Path(engine_file), _PUBLIC_KEY))


@dataclass(frozen=True)
class GroupKeys:
    """The keys of a group of processes that trust each other. All use the same pair, as server and as client."""

    secret: bytes

    @classmethod
    def create(cls) -> "GroupKeys":
        """Return a new key pair."""
        return cls(zmq.curve_keypair()[1])

    @classmethod
    def read(cls, file: str) -> "GroupKeys":
        """Read the secret key of a group.

        Raises:
            ConfigError: the file is missing or not a key file, or others may read it.
        """
        return cls(_read_secret(file))

    @classmethod
    def of(cls, file: str | None, text: str | None) -> "GroupKeys | None":
        """Return the keys in a file, or else in the text of such a file. Return None if neither is given.

        Raises:
            ConfigError: see `read`; or the text contains no key.
        """
        if file or not text:
            return cls.read(file) if file else None
        found = _SECRET_KEY.search(text)
        if not (found and _is_key(found[1].encode())):
            raise ConfigError(
                "OCTAVO_GROUP_SECRET_KEY holds no secret key",
                hint="set it to the contents of a file NAME.key_secret, which octavo keygen creates",
            )
        return cls(found[1].encode())

    @property
    def server(self) -> EngineKeys:
        """What a listening socket of the group needs."""
        return EngineKeys(self.secret, frozenset([zmq.curve_public(self.secret)]))

    @property
    def client(self) -> ClientKeys:
        """What a connecting socket of the group needs."""
        public = zmq.curve_public(self.secret)
        return ClientKeys(public, self.secret, public)


def _read_secret(file: str) -> bytes:
    path = Path(file)
    key = _read_key(path, _SECRET_KEY)
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"others may read the secret key in {path}", hint=f"chmod 600 {path}")
    return key


def _read_key(path: Path, pattern: "re.Pattern[str]") -> bytes:
    try:
        found = pattern.search(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the key in {path}: {error}") from None
    key = found[1].encode() if found else b""
    if not _is_key(key):
        kind = "secret" if pattern is _SECRET_KEY else "public"
        raise ConfigError(f"{path} holds no {kind} key", hint="octavo keygen creates such files")
    return key


def _is_key(text: bytes) -> bool:
    """Return whether the text is 32 bytes in Z85, the only requirement for both kinds of keys."""
    try:
        zmq.curve_public(text)
    except (ValueError, zmq.ZMQError):
        return False
    return True


def prepare_connection(socket: "zmq.Socket[bytes]", address: str, keys: ClientKeys | None) -> None:
    """Configure a client's socket before it connects.

    Raises:
        ConfigError: the address needs keys.
    """
    if address.startswith("tcp://"):
        check_remote(address, keys is not None)
        _limit_silence(socket)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if keys:
            socket.curve_serverkey = keys.engine
            socket.curve_publickey = keys.public
            socket.curve_secretkey = keys.secret


def prepare_listener(socket: "zmq.Socket[bytes]", address: str, keys: EngineKeys | None) -> None:
    """Configure an engine's socket before it is bound to a `tcp://` address. Earlier addresses are not affected.

    With keys, an `Authenticator` must run in the same context.

    Raises:
        ConfigError: the address needs keys.
    """
    check_remote(address, keys is not None)
    _limit_silence(socket)
    if keys:
        socket.curve_server = 1
        # Without an `Authenticator`, nobody may connect (by default, everybody could).
        socket.setsockopt(zmq.ZAP_DOMAIN, b"octavo")
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.curve_secretkey = keys.secret


def _limit_silence(socket: "zmq.Socket[bytes]") -> None:
    socket.setsockopt(zmq.HEARTBEAT_IVL, 1000 * HEARTBEAT_S)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1000 * HEARTBEAT_TIMEOUT_S)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 1000 * HANDSHAKE_TIMEOUT_S)


class Authenticator:
    """Tells libzmq which client keys are accepted, in a thread that ends with its context.

    Args:
        context: the context of the sockets.
        clients: public keys of the clients that may connect.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", clients: frozenset[bytes]) -> None:
        self._clients = clients
        # A shadow: `destroy()` of the original must not close a socket that this thread uses.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ZAP_ADDRESS)
        threading.Thread(target=self._answer, name="authenticator", daemon=True).start()

    def _answer(self) -> None:
        try:
            while True:
                version, request_id, _, _, _, mechanism, *credentials = self._socket.recv_multipart()
                may_enter = mechanism == b"CURVE" and zmq.utils.z85.encode(credentials[0]) in self._clients
                status = (b"200", b"OK") if may_enter else (b"400", b"this key may not connect")
                self._socket.send_multipart([version, request_id, *status, b"", b""])
        except zmq.ContextTerminated:
            self._socket.close()
