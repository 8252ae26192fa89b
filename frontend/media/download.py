"""Reads the media files that requests name by data, http, https and file URLs, within the server's limits.

A server must not fetch resources of its own network that the caller could not reach. Therefore host names are resolved
here, the address is checked, and the connection goes to exactly that address; the same holds for every redirect.
Environment proxies are not used, because they would choose the address.
"""

import base64
import binascii
import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from pathlib import Path
from urllib.parse import SplitResult, unquote_to_bytes, urljoin, urlsplit

from octavo.protocol.config.media import ResolvedMedia
from octavo.protocol.version import __version__

MAX_REDIRECTS = 5
_CHUNK_BYTES = 2**16
_REDIRECTS = {301, 302, 303, 307, 308}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class MediaError(Exception):
    """Why a media item cannot be used. The message is shown to the caller."""


def read_url(url: str, media: ResolvedMedia) -> bytes:
    """Return the contents of the file that a URL names.

    Blocks until: the file is complete, for at most `fetch_timeout_s` seconds.

    Raises:
        MediaError: the URL is not allowed, or the file does not exist or is too large.
    """
    scheme = url[:8].partition(":")[0].lower()
    match scheme:
        case "data":
            return _decode_data(url, media.max_file_bytes)
        case "http" | "https":
            return _download(url, media)
        case "file":
            return _read_file(url, media)
    raise MediaError("the URL of media begins with data:, http://, https:// or file://")


def _decode_data(url: str, max_bytes: int) -> bytes:
    head, comma, data = url.partition(",")
    if not comma:
        raise MediaError("a data URL has a comma before its data: data:image/png;base64,...")
    if len(data) > 3 * max_bytes:
        raise _too_large(max_bytes)
    try:
        is_base64 = head.lower().endswith(";base64")
        found = base64.b64decode(data, validate=True) if is_base64 else unquote_to_bytes(data)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"its data is not base64: {error}") from None
    if len(found) > max_bytes:
        raise _too_large(max_bytes)
    return found


def _read_file(url: str, media: ResolvedMedia) -> bytes:
    if media.allowed_local_path is None:
        raise MediaError("this server reads no local files (--allowed-local-media-path)")
    try:
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise MediaError("a file URL names no host: file:///directory/name")
        allowed, path = Path(media.allowed_local_path).resolve(), Path(unquote_to_bytes(parts.path).decode()).resolve()
        if not path.is_relative_to(allowed) or not path.is_file():
            raise FileNotFoundError
        with path.open("rb") as file:
            data = file.read(media.max_file_bytes + 1)
    except (OSError, ValueError):  # also raised for paths with a null byte, overlong paths, and paths not in UTF-8
        raise MediaError("there is no such file in the directory that this server may read") from None
    if len(data) > media.max_file_bytes:
        raise _too_large(media.max_file_bytes)
    return data


def _download(url: str, media: ResolvedMedia) -> bytes:
    deadline_s = time.monotonic() + media.fetch_timeout_s
    try:
        for _ in range(MAX_REDIRECTS + 1):
            connection = _connect(_checked(url, media), media, deadline_s)
            # A server may send its headers byte by byte, so that no single read times out.
            watchdog = threading.Timer(_left(deadline_s), _shut_down, [connection.sock])
            watchdog.start()
            try:
                found = _get(connection, url, media.max_file_bytes)
            finally:
                watchdog.cancel()
                connection.close()
            _left(deadline_s)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
    except (OSError, http.client.HTTPException, ValueError) as error:  # urljoin raises ValueError
        _left(deadline_s)
        raise MediaError(f"the download failed: {type(error).__name__}") from error
    raise MediaError(f"the URL redirects more than {MAX_REDIRECTS} times")


def _checked(url: str, media: ResolvedMedia) -> SplitResult:
    """Return the parts of a URL, if it may be fetched."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise MediaError(f"the URL is invalid: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise MediaError("the URL does not lead to an http or https server")
    if parts.username is not None or parts.password is not None:
        raise MediaError("the URL holds a user name or a password, which are not sent")
    if media.allowed_domains is not None and host not in media.allowed_domains:
        raise MediaError(f"this server fetches no media from {host} (--allowed-media-domains)")
    return parts


def _connect(parts: SplitResult, media: ResolvedMedia, deadline_s: float) -> http.client.HTTPConnection:
    """Return a connection to an address that was checked."""
    assert parts.hostname is not None, "checked"
    is_secure = parts.scheme == "https"
    port = parts.port or (443 if is_secure else 80)
    found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    usable = [one for one in found if media.allows_private_addresses or is_public(str(one[4][0]))]
    if not usable:
        raise MediaError(
            f"{parts.hostname} has no public address, and this server fetches from no others "
            "(--allow-private-media-addresses)"
        )
    family, kind, protocol, _, address = usable[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.settimeout(_left(deadline_s))
        sock.connect(address)
        if is_secure:
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=parts.hostname)
    except BaseException:
        sock.close()
        raise
    connection = http.client.HTTPConnection(parts.hostname, port)
    connection.sock = sock
    return connection


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the server has closed it already
        sock.shutdown(socket.SHUT_RDWR)


def _get(connection: http.client.HTTPConnection, url: str, max_bytes: int) -> bytes | str:
    """Return the response body, or the target of a redirect. The body ends early if the connection is shut down."""
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection.request(
        "GET", target, headers={"User-Agent": f"octavo/{__version__}", "Accept": "image/*, video/*, audio/*"}
    )
    response = connection.getresponse()
    if response.status in _REDIRECTS and (location := response.getheader("Location")):
        return location
    if response.status != http.client.OK:
        raise MediaError(f"the server of the URL answered with status {response.status}")
    data = bytearray()
    while True:
        chunk = response.read1(_CHUNK_BYTES)
        if not chunk:
            return bytes(data)
        data += chunk
        if len(data) > max_bytes:
            raise _too_large(max_bytes)


def is_public(text: str) -> bool:
    """Return whether an address belongs to the public internet, including an IPv4 address embedded in an IPv6
    address.
    """
    address: Address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None and not is_public(str(inner)):
            return False
        if address.ipv4_mapped is not None:
            return True
    return address.is_global and not address.is_multicast


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise MediaError("the download takes too long (--media-fetch-timeout)")
    return left_s


def _too_large(max_bytes: int) -> MediaError:
    return MediaError(f"the file has more than {max_bytes} bytes (--max-media-file-bytes)")
