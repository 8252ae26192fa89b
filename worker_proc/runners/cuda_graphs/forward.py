"""The `Forward` of a draft model or head on a GPU: steps of `StepGraphs` without samples, over its own cache."""

from collections import deque
from collections.abc import Mapping, Sequence

from torch import Tensor

from octavo.worker_proc.batch.inputs import Ints, StepInputs
from octavo.worker_proc.device.stream import DeviceEvent, Stream, upload_array
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.runners.cuda_graphs.graphs import StepGraphs
from octavo.worker_proc.runners.cuda_graphs.metadata import StepSize
from octavo.worker_proc.runners.cuda_graphs.sizes import idle_sizes
from octavo.worker_proc.runners.cuda_graphs.step_buffer import NUM_HOST_BUFFERS


class GraphForward:
    """See `octavo.worker_proc.runners.host.Forward`.

    Args:
        graphs: computes the steps.
        stream: stream of the device.
        cache_buffers: buffers of keys and values.
        max_size: largest size of a step.
    """

    programs = None
    state_buffers = ()

    def __init__(self, graphs: StepGraphs, stream: Stream, cache_buffers: Sequence[Tensor], max_size: StepSize) -> None:
        self.graphs = graphs
        self.cache_buffers = cache_buffers
        self._stream = stream
        self._idle_sizes = idle_sizes(max_size)
        self._events: deque[DeviceEvent] = deque()
        """Events of the steps whose host buffers may still be read."""

    def warm_up(self) -> int:
        """See `octavo.worker_proc.runners.host.Forward`: compiles all kernels and captures all graphs."""
        for size in self._idle_sizes:
            self.graphs.launch_idle(size, changes_logits=False)
        return self.graphs.capture_all()

    def run(self, inputs: StepInputs) -> None:
        """See `octavo.worker_proc.runners.host.Forward`. Blocks until the step before the previous one is over."""
        self.await_buffer()
        self.graphs.stage(inputs)
        self.graphs.compute()
        self._events.append(self._stream.record_event())

    def await_buffer(self) -> None:
        """Blocks until the device has read the host buffer that the next step is sent from."""
        if len(self._events) == NUM_HOST_BUFFERS:
            self._events.popleft().wait()

    def end_rounds(self) -> DeviceEvent:
        """Return an event after the rounds that were launched last. Their host buffer is free when it is done."""
        self._events.append(event := self._stream.record_event())
        return event

    def logits(self, rows: Ints) -> Tensor:
        """See `octavo.worker_proc.runners.host.Forward`; on the device."""
        return self.graphs.logits_of(upload_array(self._stream, rows))

    def repeat(self, rows: Ints) -> Tensor:
        """Never called: an engine that drafts repeats no steps."""
        raise AssertionError("a step of a drafter is not repeated")

    def join_step(self) -> None:
        """See `octavo.worker_proc.runners.host.Forward`; engines on GPUs do not divide experts."""

    @property
    def features(self) -> Sequence[Tensor]:
        """See `octavo.worker_proc.runners.host.Forward`; on the device."""
        return self.graphs.features

    @property
    def cross_queries(self) -> Mapping[int, Tensor]:
        """Return nothing: draft models have no cross-attention."""
        return {}

    def choose_threads(self, work: int) -> int:
        """Return 1: there is no native work."""
        return 1

    def use_model(self, model: Model | None) -> None:
        """Never called: graphs refer to the addresses of weights."""
        raise AssertionError("graphs compute with the model that they were captured with")
