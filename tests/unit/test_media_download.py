"""Where images come from: addresses, redirects, sizes and directories that a server does not allow."""

import base64
import contextlib
import http.server
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from media_settings import media

from octavo.frontend.media import download
from octavo.frontend.media.download import MediaError, is_public, read_url
from octavo.protocol.config.media import MediaConfig


class _Pages(http.server.BaseHTTPRequestHandler):
    """Pages by path; a value that is a text is where the page redirects to."""

    pages: ClassVar[dict[str, bytes | str]] = {}
    requested: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.requested.append(self.path)
        page = self.pages.get(self.path)
        if page is None:
            self.send_error(404)
        elif page == b"endless":
            with contextlib.suppress(OSError):
                self.wfile.write(b"HTTP/1.0 200 OK\r\nX-Slow: ")
                while True:
                    self.wfile.write(b"x")
                    time.sleep(0.02)
        elif isinstance(page, str):
            self.send_response(302)
            self.send_header("Location", page)
            self.end_headers()
        else:
            self.send_response(200)
            self.end_headers()  # without a length: it ends with the connection
            self.wfile.write(page)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return a server whose address counts as public; other loopback addresses do not."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Pages)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(download, "is_public", lambda text: text == "127.0.0.1")
    monkeypatch.setattr(_Pages, "requested", [])
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True),
        ("2001:4860:4860::8888", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("2002:7f00:1::", False),
        ("64:ff9b::a00:1", False),
        ("ff02::1", False),
    ],
)
def test_public_addresses(address: str, expected: bool) -> None:
    assert is_public(address) is expected


def test_a_download_follows_redirects(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Pages, "pages", {"/a?x=1": "/b", "/b": f"{address}/c", "/c": b"data"})
    assert read_url(f"{address}/a?x=1", media()) == b"data"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("http://127.0.0.2:{port}/secret", "no public address"),
        ("http://[::1]:{port}/secret", "no public address"),
        ("file:///etc/passwd", "http or https"),
        ("http://user:word@127.0.0.1:{port}/secret", "password"),
        ("/again", "redirects more than"),
        ("http://127.0.0.1:99999/", "invalid"),
        ("http://[::", "download failed"),
    ],
)
def test_redirects_are_checked_as_the_first_address_is(
    address: str, monkeypatch: pytest.MonkeyPatch, target: str, message: str
) -> None:
    port = address.rpartition(":")[2]
    monkeypatch.setattr(_Pages, "pages", {"/again": target.format(port=port), "/secret": b"secret"})
    with pytest.raises(MediaError, match=message):
        read_url(f"{address}/again", media())
    assert "/secret" not in _Pages.requested


def test_limits_of_a_download(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Pages, "pages", {"/long": b"x" * 1001, "/fits": b"x" * 1000})
    assert len(read_url(f"{address}/fits", media())) == 1000
    with pytest.raises(MediaError, match="more than 1000 bytes"):
        read_url(f"{address}/long", media())
    with pytest.raises(MediaError, match="status 404"):
        read_url(f"{address}/missing", media())
    with pytest.raises(MediaError, match="allowed-media-domains"):
        read_url(f"{address}/fits", media(allowed_domains=["example.com"]))
    assert read_url(f"{address}/fits", media(allowed_domains=["127.0.0.1"]))


def test_a_server_that_never_ends_its_headers(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Pages, "pages", {"/slow": b"endless"})
    with pytest.raises(MediaError, match="too long"):
        read_url(f"{address}/slow", media(fetch_timeout_s=0.3))


def test_private_addresses_are_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MediaError, match="allow-private-media-addresses"):
        read_url("http://localhost:9/picture.png", media())
    with pytest.raises(MediaError, match="download failed"):
        read_url("http://localhost:9/picture.png", media(allows_private_addresses=True))


@pytest.mark.parametrize("url", ["ftp://example.com/a.png", "picture.png", "", "javascript:1"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(MediaError, match="begins with data:"):
        read_url(url, media())


def test_data_urls() -> None:
    encoded = base64.b64encode(b"\x00picture").decode()
    assert read_url(f"data:image/png;base64,{encoded}", media()) == b"\x00picture"
    assert read_url("data:,a%20b", media()) == b"a b"
    for url, message in (
        ("data:image/png;base64", "comma"),
        ("data:image/png;base64,%%%", "base64"),
        ("data:," + "x" * 1001, "1000 bytes"),
        ("data:," + "x" * 5000, "1000 bytes"),
    ):
        with pytest.raises(MediaError, match=message):
            read_url(url, media())


def test_files_are_read_from_one_directory(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out.png"
    inside.mkdir()
    (inside / "a b.png").write_bytes(b"picture")
    (inside / "long.png").write_bytes(b"x" * 1001)
    outside.write_bytes(b"secret")
    (inside / "link.png").symlink_to(outside)
    allowed = media(allowed_local_path=str(inside))
    assert read_url(f"file://{inside}/a%20b.png", allowed) == b"picture"
    for url, settings, message in (
        (f"file://{inside}/a%20b.png", media(), "allowed-local-media-path"),
        (f"file://{inside}/../out.png", allowed, "no such file"),
        (f"file://{inside}/%2e%2e/out.png", allowed, "no such file"),
        (f"file://{inside}/link.png", allowed, "no such file"),
        (f"file://{inside}", allowed, "no such file"),
        (f"file://elsewhere{inside}/a%20b.png", allowed, "names no host"),
        (f"file://{inside}/long.png", allowed, "1000 bytes"),
        (f"file://{inside}/%00", allowed, "no such file"),
        (f"file://{inside}/%ff", allowed, "no such file"),
        (f"file://{inside}/{'x' * 5000}", allowed, "no such file"),
        ("file://[::", allowed, "no such file"),
    ):
        with pytest.raises(MediaError, match=message):
            read_url(url, settings)


def test_settings_have_defaults() -> None:
    assert MediaConfig().allow_private_media_addresses is False
    assert MediaConfig().allowed_local_media_path is None
