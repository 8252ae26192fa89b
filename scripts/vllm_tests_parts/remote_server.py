"""Replaces `tests.utils` of vLLM's tests: a server in a separate process, which is octavo's."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from bench_cpu_parts.drive_loop import die_with_parent

ROCM_EXTRA_ARGS: list[str] = []
VLLM_PATH = Path.cwd()
START_TIMEOUT_S = 120.0
ABBREVIATIONS = {"--lora-module": "--lora-modules"}
"""Full names of abbreviated flags: vLLM accepts prefixes of a flag's name; octavo suggests the full one."""

STAND_IN = {"max_position_embeddings": 40960}
"""Config overrides: the models of the tests have longer contexts than the checkpoint that replaces them."""


def create_new_process_for_each_test(method: str | None = None) -> Callable[[Any], Any]:
    """Return a decorator that changes nothing: the engine is a separate process anyway."""
    return lambda test: test


def multi_gpu_test(*, num_gpus: int) -> Callable[[Any], Any]:
    """Return a decorator that skips the test."""
    return pytest.mark.skip(reason=f"needs {num_gpus} GPUs")


def multi_gpu_only(*, num_gpus: int) -> Callable[[Any], Any]:
    """Return a decorator that skips the test."""
    return multi_gpu_test(num_gpus=num_gpus)


requires_fp8 = pytest.mark.skip(reason="needs a GPU with fp8")


class RemoteOpenAIServer:
    """`octavo serve`, until the context ends.

    Args:
        model: directory or name in the hub's cache.
        vllm_serve_args: the flags of the server.
        env_dict: further environment variables.
        seed: the seed of the engine.
        auto_port: whether to choose a free port.
        max_wait_seconds: time limit for the start.
        override_hf_configs: see `--hf-overrides`.

    Raises:
        RuntimeError: the server does not start; the message is its output.
    """

    DUMMY_API_KEY = "token-abc123"
    show_hidden_metrics = False

    def __init__(
        self,
        model: str,
        vllm_serve_args: Sequence[str],
        *,
        env_dict: dict[str, str] | None = None,
        seed: int | None = 0,
        auto_port: bool = True,
        max_wait_seconds: float | None = None,
        override_hf_configs: dict[str, Any] | None = None,
    ) -> None:
        flags = [ABBREVIATIONS.get(str(flag), str(flag)) for flag in vllm_serve_args]
        self.uds = flags[flags.index("--uds") + 1] if "--uds" in flags else None
        self.host = "127.0.0.1"
        self.port = None if self.uds else _free_port() if auto_port else int(flags[flags.index("--port") + 1])
        if auto_port and self.port is not None:
            flags += ["--port", str(self.port)]
        if seed is not None:
            flags += ["--seed", str(seed)]
        if "--hf-overrides" not in flags and "pooling" not in flags:
            flags += ["--hf-overrides", json.dumps(STAND_IN | (override_hf_configs or {}))]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.proc = subprocess.Popen(
            [sys.executable, "-P", "-m", "octavo", "serve", model, *flags],
            env={**os.environ, **(env_dict or {})},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,  # even if pytest is killed
        )
        try:
            self._wait(min(max_wait_seconds or START_TIMEOUT_S, START_TIMEOUT_S))
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> "RemoteOpenAIServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def url_root(self) -> str:
        """Base URL of the server."""
        return f"http://{Path(self.uds).name}" if self.uds else f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        """Return the URL of a path."""
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        """Return a client of OpenAI's API."""
        return openai.OpenAI(base_url=self.url_for("v1"), **self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """Return an asynchronous client of OpenAI's API."""
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **self._options(options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        """Return a client of Anthropic's API."""
        return anthropic.Anthropic(base_url=self.url_for(), **self._options(options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        """Return an asynchronous client of Anthropic's API."""
        return anthropic.AsyncAnthropic(base_url=self.url_for(), **self._options(options))

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 300, **options}

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        transport = httpx.HTTPTransport(uds=self.uds) if self.uds else None
        with httpx.Client(transport=transport) as client:
            while True:
                try:
                    if client.get(self.url_for("health")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                if self.proc.poll() is not None or time.monotonic() > deadline:
                    self._log.seek(0)
                    raise RuntimeError(f"octavo has not started:\n{self._log.read()[-2000:]}")
                time.sleep(0.2)

    def _stop(self) -> None:
        self.proc.terminate()
        try:
            self.proc.wait(15)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.wait()
        self._log.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
