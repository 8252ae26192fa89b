"""`Api`: a blocking HTTP client for OpenAI-compatible servers, built on the standard library.

One request at a time, on the calling thread. Displays nothing.
"""

import http.client
import json
import socket
import ssl
from collections.abc import Generator
from typing import Any
from urllib.parse import SplitResult, urlsplit

from octavo.frontend.cli.errors import CommandError

DEFAULT_URL = "http://127.0.0.1:8000"

CONNECT_TIMEOUT_S = 10.0

_EVENT = b"data:"
_DONE = b"[DONE]"


class Api:
    """A server, identified by its URL.

    Args:
        url: `http://host:port`, `https://...` or `unix:PATH`, with or without `/v1`.
        api_key: sent as the bearer token.

    Raises:
        CommandError: the URL has none of these forms.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._parts = parts = urlsplit(url)
        has_place = bool(parts.path) if parts.scheme == "unix" else bool(parts.hostname)
        if parts.scheme not in ("http", "https", "unix") or not has_place or not _has_valid_port(parts):
            raise CommandError(f"{url!r} is not the address of a server", "use http://HOST:PORT or unix:PATH")
        self._root = "" if parts.scheme == "unix" else parts.path.rstrip("/").removesuffix("/v1")

    def model(self, name: str | None) -> str:
        """Return the given model name, or the server's first model if it is None.

        Raises:
            CommandError: the server does not respond, or responds with an error.
        """
        if name is not None:
            return name
        models = self.get("/v1/models").get("data") or []
        if not models:
            raise CommandError(f"{self.url} serves no model", "name one with --model-name")
        return str(models[0]["id"])

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON response to a GET.

        Raises:
            CommandError: the server does not respond, or responds with an error or without JSON.
        """
        return self._whole("GET", path, None)

    def get_text(self, path: str) -> str:
        """Return the text of the response to a GET.

        Raises:
            CommandError: the server does not respond, or responds with an error.
        """
        return self._read("GET", path, None).decode("utf-8", "replace")

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON response to a POST.

        Raises:
            CommandError: as for `get`.
        """
        return self._whole("POST", path, json.dumps(body).encode())

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the events of a streamed response; closing the iterator aborts the request.

        Raises:
            CommandError: the server does not respond, responds with an error, or the stream fails or ends early.
        """
        connection = self._connection()
        try:
            with self._ask(connection, "POST", path, json.dumps(body | {"stream": True}).encode()) as response:
                for line in response:
                    if not line.startswith(_EVENT):
                        continue
                    data = line[len(_EVENT) :].strip()
                    if data == _DONE:
                        return
                    event = self._object(data)
                    if "error" in event:
                        raise CommandError(f"{self.url}: {_message(event)}")
                    yield event
            raise CommandError(f"{self.url} closed the connection in the middle of an answer")
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from None
        finally:
            connection.close()

    def _whole(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        return self._object(self._read(method, path, body))

    def _read(self, method: str, path: str, body: bytes | None) -> bytes:
        connection = self._connection()
        try:
            with self._ask(connection, method, path, body) as response:
                return response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from None
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        parts = self._parts
        if parts.scheme == "unix":
            return _UnixConnection(parts.path)
        if parts.scheme == "https":
            return http.client.HTTPSConnection(str(parts.hostname), parts.port, timeout=CONNECT_TIMEOUT_S)
        return http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=CONNECT_TIMEOUT_S)

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        try:
            connection.connect()
        except OSError as error:
            reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror or str(error)
            raise CommandError(
                f"no server answers at {self.url}: {reason}",
                "start one with `octavo serve MODEL`, or name another with --url",
            ) from None
        # The timeout applies to connecting only: generating a response may take any time.
        connection.sock.settimeout(None)
        connection.request(method, self._root + path, body, self._headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            with response:
                raise self._rejected(response)
        return response

    def _rejected(self, response: http.client.HTTPResponse) -> CommandError:
        text = response.read()
        try:
            message = _message(json.loads(text))
        except ValueError:
            message = text.decode("utf-8", "replace").strip().partition("\n")[0] or response.reason
        hint = "give a key with --api-key or OCTAVO_API_KEY" if response.status == http.client.UNAUTHORIZED else ""
        return CommandError(f"{self.url} answers {response.status}: {message}", hint)

    def _object(self, data: bytes) -> dict[str, Any]:
        try:
            value = json.loads(data)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise CommandError(f"{self.url} does not answer as an OpenAI-compatible server does", "check --url")
        return value

    def _broken(self, error: Exception) -> CommandError:
        return CommandError(f"the connection to {self.url} broke: {str(error) or type(error).__name__}")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the Unix socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _has_valid_port(parts: SplitResult) -> bool:
    try:
        return parts.port != 0
    except ValueError:
        return False


def _message(body: Any) -> str:
    """Return the message in an error body, in OpenAI's format or another."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
