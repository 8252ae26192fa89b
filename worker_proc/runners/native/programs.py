"""Runs a model as recorded native programs: arrays go in, the logits of chosen rows come out."""

from collections.abc import Sequence

from torch import Tensor

from octavo.kernels.native.arguments import StepArguments
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.passes import fuse
from octavo.kernels.native.program import Program
from octavo.kernels.native.recorder import ProgramRecorder
from octavo.kernels.native.split import split, with_gathered_rows
from octavo.kernels.native.threads import ThreadPolicy
from octavo.kernels.native.value import as_tensor, value_of
from octavo.kernels.paged_attention.layout import CacheLayout
from octavo.worker_proc.attention.recorded import RecordedAttention, StepBounds
from octavo.worker_proc.batch.inputs import AdapterInputs, Ints, StepInputs
from octavo.worker_proc.batch.step_arguments import address, set_adapters, step_arguments, step_without_rows
from octavo.worker_proc.cache.states import StateStorage
from octavo.worker_proc.models.base import Model


class NativePrograms:
    """Two programs: up to the last attention over all rows of a step, and the rest over rows whose logits are wanted.

    A pipeline stage that passes its rows on has one program.

    Args:
        library: where the operations are.
        model: recorded here.
        layouts: of the cache, for each of its groups.
        num_blocks: of the cache.
        bounds: of the steps.
        states: of layers with a state; None: there are none.
    """

    def __init__(
        self,
        library: NativeLibrary,
        model: Model,
        layouts: Sequence[CacheLayout],
        num_blocks: int,
        bounds: StepBounds,
        states: StateStorage | None = None,
    ) -> None:
        self._threads = ThreadPolicy(library, bounds.num_threads)
        self._no_rows = step_without_rows(len(layouts) + (states is not None))
        self._given_rows = model.given_rows
        self._is_lock_step = model.parameters.placement.engines is not None
        recorder = ProgramRecorder(model.dtype)
        self.attention = RecordedAttention(library, recorder, model.cache_groups, layouts, num_blocks, bounds, states)
        hidden = model.forward(as_tensor(recorder.token_ids), as_tensor(recorder.positions), self.attention)
        self._adapters: AdapterInputs | None = None
        """Of the last step."""
        self.head: Program | None = None
        if hidden is None:
            self.layers = Program(library, fuse(recorder.nodes, []), [], bounds.max_rows)
            return
        logits = value_of(model.logits(hidden).float())
        halves = split(fuse(recorder.nodes, [logits]))
        self.layers = Program(library, halves.all_rows, halves.passed, bounds.max_rows)
        chosen = with_gathered_rows(halves, self.layers.results, recorder)
        self.head = Program(library, chosen, [logits], bounds.max_logits)
        (self._logits_RV,) = self.head.results

    @property
    def programs(self) -> tuple[Program, ...]:
        """All, in the order in which a step runs them."""
        return (self.layers,) if self.head is None else (self.layers, self.head)

    @property
    def cache_buffers(self) -> Sequence[Tensor]:
        """See `octavo.worker_proc.runners.host.Forward`."""
        return self.attention.caches

    @property
    def num_bytes(self) -> int:
        """Bytes of all activations, if every row is used."""
        return sum(program.num_bytes for program in self.programs) + self.attention.workspace_bytes

    def run(self, inputs: StepInputs) -> None:
        """See `octavo.worker_proc.runners.host.Forward`."""
        if inputs.given is not None and self._given_rows is not None:
            self._given_rows.put(inputs.given)
        self._adapters = inputs.adapters
        self.layers.run(step_arguments(inputs), self._threads_of_layers(len(inputs.token_ids_T)))

    def join_step(self) -> None:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        if self._is_lock_step:
            self.layers.run(self._no_rows, self._threads_of_layers(0))

    def logits(self, rows: Ints) -> Tensor:
        """See `octavo.worker_proc.runners.host.Forward`."""
        assert self.head is not None, "the last stage has the logits"
        step = StepArguments(num_rows=len(rows), token_ids=address(rows))
        if self._adapters is not None:
            set_adapters(step, self._adapters.of_rows(rows))
        self.head.run(step, self._threads.choose(self.head.work * len(rows)))
        return self._logits_RV[: len(rows)]

    def _threads_of_layers(self, num_rows: int) -> int:
        # In lock step the experts here may have the tokens of other engines, whose number is not known yet.
        return self._threads.choose(self.layers.work * (self.layers.max_rows if self._is_lock_step else num_rows))

    def choose_threads(self, work: int) -> int:
        """See `octavo.worker_proc.runners.host.Forward`."""
        return self._threads.choose(work)
