"""Files of a batch that lie behind a URL: requests are fetched whole, results are put there when they are complete.

Knows nothing of what is in them.
"""

import hashlib
import http.client
import io
import urllib.error
import urllib.request
from pathlib import Path
from typing import BinaryIO

from octavo import __version__
from octavo.frontend.cli.errors import CommandError

MAX_INPUT_BYTES = 200 * 2**20
"""What OpenAI takes as a batch."""

SILENCE_TIMEOUT_S = 60.0
"""How long the other side may say nothing."""

_AGENT = {"User-Agent": f"octavo/{__version__}"}


def is_url(path: str) -> bool:
    """Tell a URL from the name of a file."""
    return path.startswith(("http://", "https://"))


def local_name(url: str) -> str:
    """Return the name of the file, in the working directory, in which what goes to a URL is gathered."""
    return f"batch-{hashlib.sha256(url.encode()).hexdigest()[:12]}.jsonl"


def fetch(url: str) -> BinaryIO:
    """Return what lies behind a URL, all of it read.

    Raises:
        CommandError: it cannot be had, or is longer than `MAX_INPUT_BYTES`.
    """
    request = urllib.request.Request(url, headers=_AGENT)
    try:
        with urllib.request.urlopen(request, timeout=SILENCE_TIMEOUT_S) as answer:
            data = answer.read(MAX_INPUT_BYTES + 1)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CommandError(f"cannot fetch {url}: {_reason(error)}", "check -i") from None
    if len(data) > MAX_INPUT_BYTES:
        raise CommandError(f"{url} has more than {MAX_INPUT_BYTES >> 20} MiB", "cut the batch into several")
    return io.BytesIO(data)


def put(path: Path, url: str) -> None:
    """Send a file to a URL by PUT, as the signed addresses of object stores take it.

    Raises:
        CommandError: it is not taken; the file stays where it is.
    """
    headers = {**_AGENT, "Content-Type": "application/jsonl", "Content-Length": str(path.stat().st_size)}
    try:
        with path.open("rb") as file:
            request = urllib.request.Request(url, file, headers, method="PUT")
            with urllib.request.urlopen(request, timeout=SILENCE_TIMEOUT_S):
                pass
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CommandError(f"cannot put the results to {url}: {_reason(error)}", f"they are in {path}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}"
    return str(getattr(error, "reason", None) or error) or type(error).__name__
