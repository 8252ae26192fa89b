"""Headless Chromium, driven through the pipe of its DevTools protocol."""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import TIMEOUT_S as WAIT_TIMEOUT_S
from waiting import wait_until

NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 40.0


class Browser:
    """One page of one browser. Messages are JSON that ends in a zero byte: https://chromedevtools.github.io/devtools-protocol."""

    def __init__(self, program: str, profile: str) -> None:
        read_commands, self._commands = os.pipe()
        self._replies, write_replies = os.pipe()
        # The browser expects the pipes as file descriptors 3 and 4. bash, unlike many shells, redirects descriptors of
        # two digits.
        shell = f'exec "$0" "$@" 3<&{read_commands} 4>&{write_replies}'
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
        ]
        flags += ["--remote-debugging-pipe", "--disable-background-networking", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            ["bash", "-c", shell, program, *flags, "about:blank"],
            pass_fds=(read_commands, write_replies),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_replies)
        self._ids = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        self.problems: list[str] = []
        """Errors in the page's console, including exceptions."""

    def attach(self) -> None:
        """Create an empty page and subscribe to its events."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str, *, width: int = 1280, height: int = 860, dark: bool = False) -> None:
        """Navigate to a page with a viewport of this size."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression, awaited."""
        result = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in result:
            raise AssertionError(f"{script}: {result['exceptionDetails']['exception'].get('description')}")
        return result["result"].get("value")

    def wait_for(self, condition: str, timeout_s: float = WAIT_TIMEOUT_S) -> Any:
        """Wait until an expression is truthy and return its value."""
        return wait_until(
            lambda: self.run(condition), lambda: f"{condition}\nproblems: {self.problems}", timeout_s=timeout_s
        )

    def type_into(self, selector: str, text: str) -> None:
        """Type into an element so that the page's event listeners run."""
        self.run(f"document.querySelector({selector!r}).focus()")
        self._call("Input.insertText", text=text)

    def press_enter(self) -> None:
        """Press and release the Enter key."""
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
            )

    def screenshot(self, path: Path) -> None:
        """Write a screenshot; the suffix of the name gives the format: .png or .webp."""
        options = {"format": "webp", "quality": 82} if path.suffix == ".webp" else {"format": "png"}
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", **options)["data"]))

    def save_downloads_to(self, folder: Path) -> None:
        """Save files that the page offers, without a question."""
        self._call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    def close(self) -> None:
        """Kill the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._replies)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == number:
                assert "error" not in reply, f"{method}: {reply['error']}"
                result: dict[str, Any] = reply["result"]
                return result
            self._note(reply)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._replies, 1 << 16) if ready else b""
            assert part, "the browser does not respond"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Yield a browser with an empty profile. If there is none, the test is skipped; under CI it fails."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        message = f"no browser found: install one of {', '.join(NAMES)}"
        pytest.fail(message, pytrace=False) if os.environ.get("CI") else pytest.skip(message)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        opened = Browser(program, profile)
        try:
            opened.attach()
            yield opened
        finally:
            opened.close()
