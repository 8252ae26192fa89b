"""A core process whose cost is measured, and a minimal frontend: its socket only."""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from bench_core_parts.fake_worker import STEP_VARIABLE
from bench_core_parts.messages import engine_config, prompt_of, submission
from octavo.protocol.codec import event_codec, request_codec
from octavo.protocol.control import CoreReady, CoreSpec
from octavo.protocol.events import Events, Reply
from octavo.protocol.requests import Abort, Call, Connect, FrontendMessage, GetStats
from octavo.protocol.supervise import Child

TIMEOUT_S = 300.0
POLL_S = 0.01


class Process:
    """Processor time and memory of a process, which may be another process's child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._clock = (~pid << 3) | 2  # CPUCLOCK_SCHED of the process: clock_getcpuclockid(3)

    @property
    def cpu_s(self) -> float:
        """Processor time used so far by all threads, in seconds."""
        return time.clock_gettime(self._clock)

    @property
    def rss_bytes(self) -> int:
        """Resident private memory in bytes."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"process {self.pid} has ended")


class Client:
    """A frontend that sends requests, and counts the events that it receives."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address)
        self._requests, self._events = request_codec(), event_codec()
        self._call_id = 0
        self.num_tokens = 0
        """Number of tokens received."""
        self.num_ended = 0
        """Number of requests that have finished or failed."""
        self.ended: list[Any] = []
        """The latest final events of requests."""
        self.send(Connect())

    def send(self, request: FrontendMessage) -> None:
        """Send a message."""
        self._socket.send_multipart(self._requests.encode(request))

    def submit(self, name: str, count: int, prompt_len: int, max_tokens: int) -> None:
        """Submit requests whose prompts share no prefix; several calls need different names."""
        salt = sum(name.encode())
        for index in range(count):
            self.send(submission(f"{name}{index}", prompt_of(index, prompt_len, salt), max_tokens))

    def abort(self, name: str, count: int) -> None:
        """Abort requests in one message."""
        self.send(Abort([f"{name}{index}" for index in range(count)]))

    def receive(self, timeout_s: float = 0.0) -> Any | None:
        """Receive, count and return the next message; `None` if none arrived in time."""
        if not self._socket.poll(1000 * timeout_s):
            return None
        message = self._events.decode(*self._socket.recv_multipart())
        if isinstance(message, Events):
            for event in message.events:
                if hasattr(event, "token_ids"):
                    self.num_tokens += len(event.token_ids)
                else:
                    self.num_ended += 1
                    self.ended = [*self.ended[-2:], event]
        return message

    def drain(self) -> None:
        """Receive and count everything that has arrived."""
        while self.receive() is not None:
            pass

    def stats(self) -> Any:
        """Return the core's counters; meanwhile, receive and count other messages."""
        self._call_id += 1
        self.send(Call(self._call_id, GetStats()))
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            message = self.receive(1.0)
            if isinstance(message, Reply) and message.call_id == self._call_id:
                return message.result
        raise TimeoutError("the core does not answer")

    def wait(self, is_reached: Callable[[Any], bool]) -> Any:
        """Wait until the counters fulfil a condition, and return them."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            if is_reached(stats := self.stats()):
                return stats
            time.sleep(POLL_S)
        raise TimeoutError(f"the core did not reach the condition: {stats}, {self.ended}")

    def close(self) -> None:
        """Disconnect without a message."""
        self._context.destroy(linger=0)


class Engine:
    """A core process, its fake worker whose steps take `step_s`, and one frontend."""

    def __init__(self, run_dir: str, step_s: float, **changes: Any) -> None:
        self.address = f"ipc://{run_dir}/core"
        spec = CoreSpec(
            config=engine_config(**changes), address=self.address, run_dir=run_dir, epoch=1, log_level="ERROR"
        )
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]))
        self._child = Child.spawn(
            "bench_core_parts.core_process", spec, "core", environment={"PYTHONPATH": path, STEP_VARIABLE: str(step_s)}
        )
        while not isinstance(self._child.receive(TIMEOUT_S), CoreReady):
            pass
        pid = self._child.pid
        (worker,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        self.process = Process(pid)
        self._worker_pid = int(worker)
        self.client = Client(self.address)

    @contextmanager
    def worker_paused(self) -> Iterator[None]:
        """Suspend the worker, so that no step ends meanwhile."""
        os.kill(self._worker_pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._worker_pid, signal.SIGCONT)

    def close(self) -> None:
        """Kill the core; its worker ends with it."""
        self.client.close()
        self._child.kill()
        self._child.wait()
        self._child.close()


@contextmanager
def running_engine(step_s: float = 0.0, **changes: Any) -> Iterator[Engine]:
    """Start an engine, and stop it on exit."""
    with tempfile.TemporaryDirectory(prefix="bench_core-") as run_dir:
        engine = Engine(run_dir, step_s, **changes)
        try:
            yield engine
        finally:
            engine.close()
