"""The responses of a server, and an event that disturbs the server while it generates them."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
from servers import Server

MAX_TOKENS = 600
NUM_REQUESTS = 4


def answers(server: Server, harm: Callable[[], None] = lambda: None) -> list[list[int]]:
    """Return the tokens of some requests that run concurrently.

    Args:
        server: with the model "m".
        harm: called once all requests have their first token.
    """
    with ThreadPoolExecutor(NUM_REQUESTS) as threads:
        streams = [threads.submit(_Stream, server, seed) for seed in range(NUM_REQUESTS)]
        started = [stream.result() for stream in streams]
        harm()
        return list(threads.map(_Stream.read_rest, started))


class _Stream:
    """A stream that has received its first token."""

    def __init__(self, server: Server, seed: int) -> None:
        body = {"model": "m", "prompt": "abc" * (seed + 1), "temperature": 1.0, "seed": seed, "max_tokens": MAX_TOKENS}
        body |= {"ignore_eos": True, "return_token_ids": True, "stream": True}
        self._client = httpx.Client(timeout=120)
        request = self._client.build_request("POST", f"{server.url}/v1/completions", json=body)
        self._lines = self._client.send(request, stream=True).iter_lines()
        self._tokens: list[int] = []
        while not self._tokens:
            self._take(next(self._lines))

    def _take(self, line: str) -> None:
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                self._tokens += choice["token_ids"] or []

    def read_rest(self) -> list[int]:
        for line in self._lines:
            self._take(line)
        self._client.close()
        assert len(self._tokens) == MAX_TOKENS
        return self._tokens
