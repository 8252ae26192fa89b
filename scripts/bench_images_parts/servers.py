"""Servers that read images, and the requests to them: each server gets the same conversations."""

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

READY_LIMIT_S = 600.0
REQUEST_LIMIT_S = 600.0
_SETTLED_S = 3.0
"""Seconds within which an engine reports its counters."""


def octavo(model: Path, port: int) -> list[str]:
    """Return the command of octavo's server."""
    program = Path(sys.executable).parent / "octavo"
    return [str(program), "serve", str(model), "--port", str(port), "--dtype", "bfloat16", "--max-num-seqs", "16"]


def llama_cpp(binary: Path, files: tuple[Path, Path], port: int, num_streams: int) -> list[str]:
    """Return the command of llama.cpp's server, whose slots share one cache."""
    threads, (text, projector) = str(len(os.sched_getaffinity(0))), files
    words = [str(binary), "-m", str(text), "--mmproj", str(projector), "--port", str(port), "-t", threads]
    return [*words, "-np", str(num_streams), "-c", str(4096 * num_streams), "--kv-unified", "--no-warmup"]


def vllm(python: Path, model: Path, port: int) -> list[str]:
    """Return the command of vLLM's server."""
    words = [str(python.parent / "vllm"), "serve", str(model), "--port", str(port), "--dtype", "bfloat16"]
    return [*words, "--max-num-seqs", "16", "--max-model-len", "8192"]


class ImageServer:
    """A running server.

    Args:
        name: name of the server in errors.
        command: the command that starts it.
        model: the name of the model in requests.
        port: the port on this machine.
        log: file for its output.
    """

    def __init__(self, name: str, command: Sequence[str], model: str, port: int, log: Path) -> None:
        self.name, self._model, self._port, self._log = name, model, port, log
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))  # vLLM leaves out one of them otherwise
        for_vllm = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores}
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **for_vllm}
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)

    def wait_until_ready(self) -> None:
        """Wait until the server is ready.

        Raises:
            SystemExit: the server has exited, or is not ready in time.
        """
        end = time.monotonic() + READY_LIMIT_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                if self._get("/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.2)
        lines = self._log.read_text(errors="replace").splitlines()[-15:]
        raise SystemExit(f"{self.name} is not ready:\n" + "\n".join(lines))

    def first_token_s(self, messages: list[dict[str, Any]]) -> tuple[float, str]:
        """Return the seconds until the first token of an answer, and the answer, which has a few tokens.

        Raises:
            SystemExit: the server rejects the request.
        """
        body = {"model": self._model, "messages": messages, "max_tokens": 4, "temperature": 0, "stream": True}
        content = json.dumps({**body, "ignore_eos": True})
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_LIMIT_S)
        started = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", content, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{self.name} answers {response.status}: {response.read()[:500]!r}")
        first_s, text = None, ""
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            choices = json.loads(line.removeprefix(b"data: ")).get("choices") or [{}]
            # Random weights also draw tokens without text: llama.cpp sends null for them, the others "".
            if choices[0].get("finish_reason") is None and "content" in choices[0].get("delta", {}):
                has_role = "role" in choices[0]["delta"]
                first_s = first_s or (None if has_role else time.perf_counter() - started)
                text += choices[0]["delta"]["content"] or ""
        connection.close()
        return first_s or time.perf_counter() - started, text

    def num_encoded(self) -> int:
        """Return how many images octavo has encoded."""
        time.sleep(_SETTLED_S)
        totals = {}
        for line in self._get("/metrics")[1].decode().splitlines():
            name, _, value = line.rpartition(" ")
            totals[name.partition("{")[0]] = value
        queries, hits = (float(totals[f"octavo:encoder_cache_{one}_total"]) for one in ("queries", "hits"))
        return int(queries - hits)

    def close(self) -> None:
        """Stop the server."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()
