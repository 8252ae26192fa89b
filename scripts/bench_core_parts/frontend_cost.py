"""Processor time of a real HTTP server per token and per completion. This process plays the core and the callers.

Each step is sent after every stream has received its token of the previous step, so every message has one token.
"""

import asyncio
import json
import os
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import uvloop
import zmq
from bench_overhead import NAME, WORDS, write_model
from http_load import drive, encode_request
from own_server import serving

from bench_core_parts.engine import Process
from bench_core_parts.scenarios import Figures
from octavo.frontend.engine_configs import read_config
from octavo.protocol.codec import event_codec, request_codec
from octavo.protocol.config import EngineConfig, ModelConfig
from octavo.protocol.events import EngineFacts, Event, Events, Finished, FinishReason, Tokens, Welcome
from octavo.protocol.requests import Connect, Submit

NUM_WINDOWS = 5
STEPS_PER_WINDOW = 30
WARM_UP_STEPS = 10
NUM_REQUESTS = 500
NUM_CONNECTIONS = 50
PROMPT_WORDS = 16
FIRST_TOKEN, NUM_TOKENS = 1000, 50
"""Tokens that are complete characters in the default model's vocabulary, so that each is an event."""
PATHS = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}


def frontend_cost(num_streams: int) -> Figures:
    """Return microseconds per token with `num_streams` streams, and per complete response of two tokens."""
    with (
        tempfile.TemporaryDirectory(prefix="bench_core-") as directory,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_measure(directory, num_streams))


class PlayedCore:
    """The core's end of the connection, on the event loop."""

    def __init__(self, address: str, directory: str) -> None:
        config = read_config(EngineConfig(model=ModelConfig(model=directory, load_format="dummy")))
        config = msgspec.structs.replace(config, served_model_names=[NAME], max_num_queued_reqs=0)
        self._facts = EngineFacts(
            epoch=1,
            model=directory,
            served_model_names=[NAME],
            max_model_len=2048,
            vocab_size=config.model.vocab_size,
            block_size=16,
            num_blocks=64,
            max_num_seqs=8,
            max_logprobs=20,
            dtype="float32",
            device="cpu",
            config=msgspec.msgpack.encode(config),
        )
        self.context = zmq.Context()
        self._socket = self.context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._requests, self._events = request_codec(), event_codec()
        self._peer = b""
        self.waiting: list[str] = []
        """Requests that are not answered immediately."""
        self.answers_at_once = False
        asyncio.get_running_loop().add_reader(self._socket.getsockopt(zmq.FD), self.receive)

    def receive(self) -> None:
        """Take all requests. The descriptor signals changes only, so call this after sending too."""
        answers: list[Any] = []
        while self._socket.poll(0):
            self._peer, *frames = self._socket.recv_multipart()
            match self._requests.decode(*frames):
                case Connect():
                    self._send(Welcome(self._facts))
                case Submit(request_id) if self.answers_at_once:
                    answers += [Tokens(request_id, [5000, 6000]), Finished(request_id, FinishReason.LENGTH)]
                case Submit(request_id):
                    self.waiting.append(request_id)
        if answers:
            self.send(answers)

    def send(self, events: list[Any]) -> None:
        """Send the events of a step."""
        self._send(Events(1, events))
        asyncio.get_running_loop().call_soon(self.receive)

    def close(self) -> None:
        """Disconnect."""
        asyncio.get_running_loop().remove_reader(self._socket.getsockopt(zmq.FD))
        self.context.destroy(linger=0)

    def _send(self, event: Event) -> None:
        self._socket.send_multipart([self._peer, *self._events.encode(event)])


class _Reader(asyncio.Protocol):
    """Counts the server-sent events of all streams."""

    num_events = 0

    def data_received(self, data: bytes) -> None:
        _Reader.num_events += data.count(b"data: ")


async def _measure(directory: str, num_streams: int) -> Figures:
    write_model(Path(directory))
    address = f"ipc://{directory}/core"
    core = PlayedCore(address, directory)
    figures: Figures = {}
    entering = serving(f"--join={address}", ["--disable-uvicorn-access-log"])
    url, pid = await asyncio.to_thread(entering.__enter__)
    try:
        process, port = Process(pid), int(url.rpartition(":")[2])
        for kind in PATHS:
            us, system_us = await _us_per_token(core, process, port, kind, num_streams)
            name = f"frontend, {num_streams} {kind} streams"
            figures[f"{name}: us/token"] = us
            figures[f"{name}: of it in the kernel, us/token"] = system_us
        core.answers_at_once = True
        for kind in PATHS:
            figures[f"frontend, whole {kind}: us/request"] = await _us_per_request(process, port, kind)
    finally:
        await asyncio.to_thread(entering.__exit__, None, None, None)
        core.close()
    return figures


async def _us_per_token(
    core: PlayedCore, process: Process, port: int, kind: str, num_streams: int
) -> tuple[float, float]:
    loop = asyncio.get_running_loop()
    rng = random.Random(0)
    transports = []
    core.waiting.clear()
    for _ in range(num_streams):
        transport, _ = await loop.create_connection(_Reader, "127.0.0.1", port)
        transport.write(request(kind, rng, PROMPT_WORDS, is_streamed=True))
        transports.append(transport)
    await until(lambda: len(core.waiting) == num_streams)

    async def step(number: int) -> None:
        wanted = _Reader.num_events + num_streams
        core.send(
            [Tokens(name, [FIRST_TOKEN + (index + number) % NUM_TOKENS]) for index, name in enumerate(core.waiting)]
        )
        await until(lambda: _Reader.num_events >= wanted)

    for number in range(WARM_UP_STEPS):
        await step(number)
    windows, system_windows = [], []
    for _ in range(NUM_WINDOWS):
        cpu_s, system_s = process.cpu_s, _system_s(process.pid)
        for number in range(STEPS_PER_WINDOW):
            await step(number)
        num_tokens = STEPS_PER_WINDOW * num_streams
        windows.append(1e6 * (process.cpu_s - cpu_s) / num_tokens)
        system_windows.append(1e6 * (_system_s(process.pid) - system_s) / num_tokens)
    for transport in transports:
        transport.abort()
    return statistics.median(windows), statistics.median(system_windows)


async def _us_per_request(process: Process, port: int, kind: str) -> float:
    windows = []
    rng = random.Random(0)
    for _ in range(1 + NUM_WINDOWS):
        requests = [request(kind, rng, PROMPT_WORDS, is_streamed=False) for _ in range(NUM_REQUESTS)]
        cpu_s = process.cpu_s
        answers = await drive("127.0.0.1", port, requests, NUM_CONNECTIONS)
        assert all(answer.status == 200 for answer in answers)
        windows.append(1e6 * (process.cpu_s - cpu_s) / NUM_REQUESTS)
    return statistics.median(windows[1:])


def request(kind: str, rng: random.Random, num_words: int, *, is_streamed: bool, more_headers: bytes = b"") -> bytes:
    """Return the bytes of an HTTP request.

    Args:
        kind: a key of `PATHS`.
        rng: draws the words.
        num_words: length of the prompt in words, about as many tokens.
        is_streamed: whether the response is streamed.
        more_headers: further header lines.
    """
    text = " ".join(rng.choices(WORDS, k=num_words))
    prompt = {"messages": [{"role": "user", "content": text}]} if kind == "chat" else {"prompt": text}
    body = {"model": NAME, "max_tokens": 1800, "ignore_eos": True, "stream": is_streamed, **prompt}
    encoded = encode_request(PATHS[kind], json.dumps(body).encode(), "localhost")
    head, _, rest = encoded.partition(b"\r\n\r\n")
    return head + b"\r\n" + more_headers + b"\r\n" + rest


def _system_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[12]) / os.sysconf("SC_CLK_TCK")


async def until(is_reached: Callable[[], bool]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(60):
        while not is_reached():  # noqa: ASYNC110
            await asyncio.sleep(0)
