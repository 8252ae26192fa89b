"""TLS: unusable files fail early, client certificates are verified, and a new certificate needs no restart."""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from fake_client import FakeClient
from http_client import application
from waiting import TIMEOUT_S, until

from octavo.frontend.http import server as server_module
from octavo.frontend.http.listener import listen
from octavo.frontend.http.server import Server
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import ConfigError


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 that is its own authority, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "caller", "stranger"):
        make_certificate(folder, name)
    return folder


def tls(folder: Path, **changes: object) -> ServerConfig:
    files = {"ssl_certfile": str(folder / "server.pem"), "ssl_keyfile": str(folder / "server.key")}
    return ServerConfig(port=0, **{**files, **changes})


def trusting(certificate: Path, own: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(certificate))
    if own is not None:
        context.load_cert_chain(own, own.with_suffix(".key"))
    return context


def serve(config: ServerConfig, scenario: Callable[[str, Server], Awaitable[None]]) -> None:
    async def main() -> None:
        listener = listen(config)
        client = FakeClient()
        server = Server(application(client), config, client)
        serving = asyncio.create_task(server.serve(sockets=[listener.socket]))
        try:
            await until(lambda: server.started)
            await scenario(listener.url, server)
        finally:
            server.on_signal(signal.SIGTERM)
            await asyncio.wait_for(serving, 30)
            listener.close()

    asyncio.run(main())


async def ask(url: str, context: ssl.SSLContext) -> int:
    async with httpx.AsyncClient(verify=context) as http:
        return (await http.get(url + "/version")).status_code


def test_callers_who_trust_the_certificate_are_served_over_https(folder: Path) -> None:
    async def scenario(url: str, server: Server) -> None:
        assert url.startswith("https://127.0.0.1:")
        assert await ask(url, trusting(folder / "server.pem")) == 200
        with pytest.raises(httpx.ConnectError, match="self-signed certificate"):
            await ask(url, trusting(folder / "stranger.pem"))

    serve(tls(folder), scenario)


def test_an_unfinished_tls_handshake_does_not_delay_the_shutdown(folder: Path) -> None:
    async def scenario(url: str, server: Server) -> None:
        parts = urlsplit(url)
        silent.append(socket.create_connection((parts.hostname, parts.port), timeout=TIMEOUT_S))
        await asyncio.sleep(0.2)

    silent: list[socket.socket] = []
    serve(tls(folder), scenario)
    assert silent[0].recv(1) == b""
    silent[0].close()


def test_callers_may_be_asked_for_a_certificate_of_their_own(folder: Path) -> None:
    async def scenario(url: str, server: Server) -> None:
        assert await ask(url, trusting(folder / "server.pem", folder / "caller.pem")) == 200
        for own in (None, folder / "stranger.pem"):
            with pytest.raises(httpx.TransportError):
                await ask(url, trusting(folder / "server.pem", own))

    serve(tls(folder, ssl_ca_certs=str(folder / "caller.pem"), ssl_cert_reqs=2), scenario)


def test_ciphers_that_are_named_are_the_only_ones_of_tls_1_2(folder: Path) -> None:
    strong, fast = "ECDHE-ECDSA-AES256-GCM-SHA384", "ECDHE-ECDSA-AES128-GCM-SHA256"

    def with_cipher(name: str) -> ssl.SSLContext:
        context = trusting(folder / "server.pem")
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(name)
        return context

    async def any_goes(url: str, server: Server) -> None:
        assert [await ask(url, with_cipher(name)) for name in (strong, fast)] == [200, 200]

    async def one_goes(url: str, server: Server) -> None:
        assert await ask(url, with_cipher(strong)) == 200
        with pytest.raises(httpx.ConnectError):
            await ask(url, with_cipher(fast))

    serve(tls(folder), any_goes)
    serve(tls(folder, ssl_ciphers=strong), one_goes)


def test_a_new_certificate_is_taken_up_and_a_broken_one_is_not(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(server_module, "TICK_S", 0.02)
    certificate, key = make_certificate(tmp_path, "server")
    old = certificate.read_bytes()
    (tmp_path / "old.pem").write_bytes(old)

    async def scenario(url: str, server: Server) -> None:
        async def is_taken_up() -> bool:
            with contextlib.suppress(httpx.ConnectError):
                return await ask(url, trusting(certificate)) == 200
            return False

        assert await ask(url, trusting(tmp_path / "old.pem")) == 200
        make_certificate(tmp_path, "server")
        os.utime(certificate, ns=(1, 1))  # a change that no clock is too coarse for
        await until(is_taken_up)
        key.write_text("nonsense")
        await asyncio.sleep(0.2)
        assert await ask(url, trusting(certificate)) == 200

    serve(tls(tmp_path, enable_ssl_refresh=True), scenario)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ssl_certfile": None}, "TLS needs a certificate"),
        ({"ssl_certfile": "/nowhere/a.pem"}, "there is no file /nowhere/a.pem"),
        ({"ssl_keyfile": "{folder}/stranger.key"}, "cannot be used"),
        ({"ssl_keyfile": None}, "cannot be used"),
        ({"ssl_cert_reqs": 2}, "no CA to verify them"),
        ({"ssl_ca_certs": "{folder}/server.key"}, "cannot be used"),
        ({"ssl_ciphers": "ROT13"}, "'ROT13' names no cipher"),
    ],
    ids=str,
)
def test_invalid_tls_settings_are_reported_at_the_start(folder: Path, changes, says) -> None:
    changes = {
        name: value.format(folder=folder) if isinstance(value, str) else value for name, value in changes.items()
    }
    with pytest.raises(ConfigError, match=says):
        listen(tls(folder, **changes))
