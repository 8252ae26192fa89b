"""Batch files at URLs: requests are downloaded completely before the run; results are uploaded after it."""

import hashlib
import http.client
import io
import urllib.error
import urllib.request
from pathlib import Path
from typing import BinaryIO

from octavo.frontend.cli.errors import CommandError
from octavo.protocol.version import __version__

MAX_INPUT_BYTES = 200 * 2**20
"""OpenAI's limit of a batch file."""

SILENCE_TIMEOUT_S = 60.0
"""Seconds without data after which a connection times out."""

_AGENT = {"User-Agent": f"octavo/{__version__}"}


def is_url(path: str) -> bool:
    """Return whether a name is a URL."""
    return path.startswith(("http://", "https://"))


def local_name(url: str) -> str:
    """Return the name of the local file, in the working directory, that collects the results for a URL."""
    return f"batch-{hashlib.sha256(url.encode()).hexdigest()[:12]}.jsonl"


def fetch(url: str) -> BinaryIO:
    """Download the file at a URL.

    Raises:
        CommandError: the download failed, or the file is larger than `MAX_INPUT_BYTES`.
    """
    request = urllib.request.Request(url, headers=_AGENT)
    try:
        with urllib.request.urlopen(request, timeout=SILENCE_TIMEOUT_S) as answer:
            data = answer.read(MAX_INPUT_BYTES + 1)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CommandError(f"cannot fetch {url}: {_reason(error)}", "check -i") from None
    if len(data) > MAX_INPUT_BYTES:
        raise CommandError(f"{url} has more than {MAX_INPUT_BYTES >> 20} MiB", "split the batch")
    return io.BytesIO(data)


def put(path: Path, url: str) -> None:
    """Upload a file with PUT, as signed URLs of object stores expect.

    Raises:
        CommandError: the upload failed; the file is kept.
    """
    headers = {**_AGENT, "Content-Type": "application/jsonl", "Content-Length": str(path.stat().st_size)}
    try:
        with path.open("rb") as file:
            request = urllib.request.Request(url, file, headers, method="PUT")
            with urllib.request.urlopen(request, timeout=SILENCE_TIMEOUT_S):
                pass
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CommandError(f"cannot upload the results to {url}: {_reason(error)}", f"they are in {path}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        with error:  # the error holds the connection
            return f"HTTP {error.code}"
    return str(getattr(error, "reason", None) or error) or type(error).__name__
