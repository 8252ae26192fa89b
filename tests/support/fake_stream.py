"""A fake device: torch on the CPU behaves like a device that computes asynchronously and replays graphs.

Silent errors of a real device are exceptions here: a host buffer changed before the device has read it, a result read
before it is ready, a graph that waits for the host or reads freed memory.

Kernels run in order, so races between them are not detected. Triton's kernels are recorded where they are
interpreted.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NOT_THERE = 0x5A
"""The value of every byte that has not been copied yet."""
_WAITS = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"})

Launch = Callable[[], object]


class FakeEvent:
    """Done when the main thread has waited for it or for a later one; other threads wait for the main thread."""

    def __init__(self, stream: "FakeStream", number: int) -> None:
        self._stream = stream
        self._number = number
        self._event = threading.Event()

    def is_done(self) -> bool:
        return self._event.is_set()

    def wait(self) -> None:
        if not self._stream.waits_for_main or threading.current_thread() is threading.main_thread():
            self._stream.num_waits += 1
            self._stream.catch_up(self._number)
        self._event.wait()

    def seconds_since(self, earlier: "FakeEvent") -> float:
        assert self.is_done() and earlier.is_done(), "the device has not come to it"
        return 1e-3 * (self._number - earlier._number)

    def set_done(self) -> None:
        self._event.set()


class FakeGraph:
    """Recorded operations, which are replayed on the same memory."""

    def __init__(self, stream: "FakeStream", recorder: "_Recorder", pool: object) -> None:
        self._stream = stream
        self._launches = recorder.launches
        self.nodes = recorder.nodes
        """The name of the kernel, or of torch's operation, of each launch."""
        self.read = recorder.read
        """Addresses of the storages that were there before the capture."""
        self.pool = pool

    def replay(self) -> None:
        self._stream.num_replays += 1
        for launch in self._launches:
            launch()


class FakeStream:
    """See the module.

    Args:
        waits_for_main: whether the device stands still until the main thread waits for it; otherwise any thread does.
    """

    def __init__(self, *, waits_for_main: bool = True) -> None:
        self.waits_for_main = waits_for_main
        self._lock = threading.Lock()
        self.torch_device = torch.device("cpu")
        self.graphs: list[FakeGraph] = []
        self.num_replays = 0
        self.num_uploads = 0
        self.uploaded_bytes = 0
        self.num_waits = 0
        self._pending: list[Callable[[], None]] = []
        """Effects and checks that run when the device reaches them."""
        self._events: list[tuple[int, FakeEvent]] = []

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def upload(self, target: Tensor, source: Tensor) -> None:
        self.num_uploads += 1
        self.uploaded_bytes += source.nbytes
        target.copy_(source)
        before = source.clone()

        def check() -> None:
            assert torch.equal(source, before), "a host buffer was changed before the device had read it"

        self._pending.append(check)

    def download(self, source: Tensor) -> Tensor:
        value, target = source.clone(), torch.empty(source.shape, dtype=source.dtype)
        target.view(torch.uint8).fill_(_NOT_THERE)
        self._pending.append(lambda: _copy(target, value))
        return target

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self, len(self._pending))
        self._events.append((len(self._pending), event))
        self._pending.append(event.set_done)
        return event

    @torch.inference_mode()
    def catch_up(self, number: int | None = None) -> None:
        """Have the device do all work, or the work up to the event with this number."""
        end = len(self._pending) if number is None else number + 1
        with self._lock:
            for index in range(end):
                action, self._pending[index] = self._pending[index], _done
                action()

    def run_aside(self, body: Launch) -> None:
        body()

    def new_graph_pool(self) -> object:
        return object()

    def capture(self, body: Callable[[], object], pool: object) -> FakeGraph:
        self.catch_up()
        recorder = _Recorder()
        with recorder, _recorded_kernels(recorder):
            body()
        graph = FakeGraph(self, recorder, pool)
        self.graphs.append(graph)
        return graph


def _copy(target: Tensor, value: Tensor) -> None:
    target.copy_(value)


def _done() -> None:
    """An effect that has run already."""


class _Recorder(TorchDispatchMode):
    """Records operations instead of running them; their results are undefined until the graph is replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self.nodes: list[str] = []
        self.read: set[int] = set()
        self._made: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        assert name not in _WAITS, f"a graph cannot wait for {name}"
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.note(inputs)
        if func._schema.is_mutable:
            self.launches.append(lambda: func(*args, **kwargs))
            self.nodes.append(name)
            return kwargs.get("out", args[0])
        result = func(*args, **kwargs)
        if name.startswith("c10d::"):  # all ranks capture and replay it in the same order
            self.launches.append(lambda: func(*args, **kwargs)[1].wait())
            self.nodes.append(name)
            return result
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if any(_address(output) in {_address(tensor) for tensor in inputs} for output in outputs):
            return result  # a view stays one
        self._made += outputs
        self.launches.append(lambda: _again(func, args, kwargs, outputs))
        self.nodes.append(name)
        for output in outputs:
            # Integers may be indices, which must be some of the table.
            output.fill_(torch.nan if output.is_floating_point() else 0)
        return result

    def note(self, inputs: list[Tensor]) -> None:
        """Note memory that a graph reads or writes but did not allocate."""
        made = {_address(tensor) for tensor in self._made}
        self.read |= {_address(tensor) for tensor in inputs} - made


def _again(func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
    for output, value in zip(outputs, tree_leaves(func(*args, **kwargs)), strict=True):
        output.copy_(value)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def _recorded_kernels(recorder: _Recorder) -> Iterator[None]:
    """Record launches of interpreted kernels, too."""
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        yield
        return
    original = GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        recorder.note([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
        recorder.launches.append(lambda: original(self, *args, **kwargs))
        recorder.nodes.append(self.fn.__name__.strip("_"))

    GridExecutor.__call__ = call
    try:
        yield
    finally:
        GridExecutor.__call__ = original
