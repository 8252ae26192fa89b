"""A session with llama.cpp's server, through its own completion endpoint; runs in octavo's Python.

llama.cpp batches requests only in its server, so the server is used for one stream too: one HTTP request costs little
compared with 256 tokens. Options: `command` of the server, which contains its `port`.
"""

import http.client
import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from drive_loop import Generate, die_with_parent, run


def load(options: dict[str, Any]) -> tuple[Generate, int]:
    """Start a server; it ends together with this process."""
    process = subprocess.Popen(options["command"], preexec_fn=die_with_parent)
    port = options["port"]
    while not _is_ready(port):
        if process.poll() is not None:
            raise SystemExit(f"llama-server ended with code {process.returncode}")
        time.sleep(0.05)

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt, count: _complete(port, prompt, count), prompts, max_tokens))

    return generate, process.pid


def _is_ready(port: int) -> bool:
    try:
        return _ask(port, "GET", "/health").get("status") == "ok"
    except OSError:
        return False


def _complete(port: int, prompt: list[int], max_tokens: int) -> int:
    answer = _ask(
        port,
        "POST",
        "/completion",
        {"prompt": prompt, "n_predict": max_tokens, "ignore_eos": True, "temperature": 0, "cache_prompt": True},
    )
    return int(answer["tokens_predicted"])


def _ask(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer
    finally:
        connection.close()


if __name__ == "__main__":
    run(load)
