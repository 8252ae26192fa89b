"""A core process under test, and a frontend that is only a socket."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import zmq
from core_fakes import core_config
from specs import PYTHONPATH

from octavo.protocol.codec import event_codec, request_codec
from octavo.protocol.control import ControlMessage, CoreReady, CoreSpec
from octavo.protocol.events import EngineFacts, Event, Events, RequestEvent, Tokens, Welcome, split_events
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Connect, FrontendMessage, Submit
from octavo.protocol.supervise import Child

TIMEOUT_S = 120.0
"""Timeout in seconds of all waits; generous, so that a slow machine fails no test."""


class CoreUnderTest:
    """A core process over fake workers."""

    def __init__(self, run_dir: Path, fault: str = "", **changes) -> None:
        config = core_config(**changes)
        config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, architecture=fault))
        self.address = f"ipc://{run_dir}/core"
        self.messages: list[ControlMessage] = []
        spec = CoreSpec(
            config=config, address=self.address, run_dir=str(run_dir), epoch=7, check_invariants=True, log_level="INFO"
        )
        self.child = Child.spawn("core_fake_main", spec, "core", environment={"PYTHONPATH": PYTHONPATH})

    def wait_until_ready(self) -> CoreReady:
        """Return the last message of the start-up; raises ChildExited if it fails."""
        while True:
            message = self.child.receive(TIMEOUT_S)
            assert message is not None, "the core does not become ready"
            self.messages.append(message)
            if isinstance(message, CoreReady):
                return message

    def wait_for_exit(self) -> int:
        """Return the exit code of a core that ends by itself."""
        code = self.child.wait(TIMEOUT_S)
        assert code is not None, "the core does not end"
        return code


@contextlib.contextmanager
def running_core(run_dir: Path, fault: str = "", **changes) -> Iterator[CoreUnderTest]:
    """Start a core, wait until it is ready, and stop it on exit."""
    core = CoreUnderTest(run_dir, fault, **changes)
    try:
        core.wait_until_ready()
        yield core
    finally:
        core.child.kill()
        core.child.stop(timeout_s=5.0)


class SocketClient:
    """A frontend that only sends and receives."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(address)
        self._requests, self._events = request_codec(), event_codec()
        self.received: list[Event] = []

    def __enter__(self) -> "SocketClient":
        return self

    def __exit__(self, *exception: object) -> None:
        self._context.destroy(linger=0)

    def connect(self) -> EngineFacts:
        """Connect and return the core's facts."""
        self.send(Connect())
        return self.receive_until(lambda event: isinstance(event, Welcome)).facts

    def send(self, request: FrontendMessage) -> None:
        """Send a message."""
        self._socket.send_multipart(self._requests.encode(request))

    def send_frames(self, *frames: bytes) -> None:
        """Send raw frames."""
        self._socket.send_multipart(frames)

    def submit(self, request_id: str, prompt: list[int], max_tokens: int = 4, **sampling) -> None:
        """Submit a request."""
        self.send(Submit(request_id, pack_ids(prompt), SamplingSpec(max_tokens=max_tokens, seed=0, **sampling)))

    def receive_until(self, is_wanted: Callable[[Event], bool]) -> Event:
        """Return the first matching event; all events are appended to `received`."""
        deadline = time.monotonic() + TIMEOUT_S
        while self._socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            event = self._events.decode(self._socket.recv())
            self.received.append(event)
            if is_wanted(event):
                return event
        raise AssertionError(f"the event did not come; there were {self.received[-5:]}")

    def request_events(self, request_id: str) -> list[RequestEvent]:
        """Return the events of one request."""
        events = [part for event in self.received if isinstance(event, Events) for part in split_events(event.events)]
        return [event for event in events if event.request_id == request_id]

    def token_ids(self, request_id: str) -> list[int]:
        """Return the tokens of one request that have come so far."""
        events = [event for event in self.request_events(request_id) if isinstance(event, Tokens)]
        return [token for event in events for token in event.token_ids]

    def finish(self, *request_ids: str) -> None:
        """Receive until each of these requests has ended."""
        for request_id in request_ids:
            if not self.has_ended(request_id):
                self.receive_until(lambda event, request_id=request_id: self.has_ended(request_id))

    def has_ended(self, request_id: str) -> bool:
        """Whether a request has ended."""
        events = self.request_events(request_id)
        return bool(events) and type(events[-1]).__name__ in ("Finished", "Failed")
