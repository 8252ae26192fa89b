"""Runs a model as recorded native programs: arrays go in, the logits of chosen rows come out."""

from collections.abc import Mapping, Sequence

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
from octavo.worker_proc.attention.recorded import RecordedAttention, StepBounds, allocate_caches, buffers_of
from octavo.worker_proc.batch.inputs import AdapterInputs, Ints, StepInputs
from octavo.worker_proc.batch.step_arguments import address, set_adapters, step_arguments, step_without_rows
from octavo.worker_proc.cache.states import StateStorage
from octavo.worker_proc.models.base import Model


class NativePrograms:
    """Two programs: one up to the last attention, over all rows of a step, and one for the rest, over rows with logits.

    A pipeline stage that passes its rows on has only the first program.

    Args:
        library: library that has the operations.
        model: model to record.
        layouts: cache layout of each group.
        num_blocks: number of blocks of the cache.
        bounds: bounds of the steps.
        states: states of layers with a state; `None` if there are none.
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
        self._library, self._bounds, self._states, self._layouts = library, bounds, states, layouts
        self._threads = ThreadPolicy(library, bounds.num_threads)
        self._no_rows = step_without_rows(len(layouts) + (states is not None))
        self._is_lock_step = model.parameters.placement.engines is not None
        self._caches = allocate_caches(model.cache_groups, layouts, num_blocks)
        self._parts: tuple[Program, ...] = ()
        """`layers`, and `head` if there is one; empty while there is no model."""
        self._logits_RV: Tensor | None = None
        self._features: Sequence[Tensor] = ()
        self._cross_queries: Mapping[int, Tensor] = {}
        self._inputs: StepInputs | None = None
        """Arrays of the last step, which its arguments point into."""
        self._step, self._chosen = StepArguments(), StepArguments()
        """Latest arguments of each program."""
        self._last_logits_RV: Tensor | None = None
        """Logits that `logits` returned last."""
        self.use_model(model)

    def _record(self, model: Model) -> None:
        model.prepare(self._bounds.max_context)
        self._given_rows, self._step_angles = model.given_rows, model.step_angles
        recorder = ProgramRecorder(model.dtype)
        library, bounds, groups = self._library, self._bounds, model.cache_groups
        attention = RecordedAttention(
            library,
            recorder,
            groups,
            self._layouts,
            self._caches,
            bounds,
            self._states,
            model.cache_scales,
            model.cross_cache,
        )
        self.attention: RecordedAttention | None = attention
        hidden = model.forward(as_tensor(recorder.token_ids), as_tensor(recorder.positions), attention)
        self._adapters: AdapterInputs | None = None
        """Adapters of the last step."""
        if hidden is None:
            self._parts = (Program(library, fuse(recorder.nodes, []), [], bounds.max_rows),)
            return
        logits = value_of(model.logits(hidden).float())
        features = [value_of(one_TD) for one_TD in model.features.results] if model.features is not None else []
        kept = [*features, *(value_of(q_TNH) for q_TNH in attention.cross_queries.values())]
        halves = split(fuse(recorder.nodes, [logits, *kept]), kept)
        layers = Program(library, halves.all_rows, [*halves.passed, *kept], bounds.max_rows)
        results = layers.results[len(halves.passed) :]
        self._features = results[: len(features)]
        self._cross_queries = dict(zip(attention.cross_queries, results[len(features) :], strict=True))
        chosen = with_gathered_rows(halves, layers.results[: len(halves.passed)], recorder)
        head = Program(library, chosen, [logits], bounds.max_logits)
        layers.expect(head)
        head.expect(layers)
        self._parts = (layers, head)
        (self._logits_RV,) = head.results

    def use_model(self, model: Model | None) -> None:
        """See `octavo.worker_proc.runners.host.Forward`. The programs are recorded again, over the same cache."""
        self._parts, self._logits_RV, self._features, self.attention = (), None, (), None
        self._cross_queries = {}
        self._last_logits_RV = None
        if model is not None:
            self._record(model)

    @property
    def layers(self) -> Program:
        """The first program."""
        assert self._parts, "there is no model"
        return self._parts[0]

    @property
    def head(self) -> Program | None:
        """The second program; `None` if this pipeline stage passes its rows on."""
        return self._parts[1] if len(self._parts) > 1 else None

    @property
    def programs(self) -> tuple[Program, ...]:
        """All programs, in the order in which a step runs them."""
        return self._parts

    @property
    def cache_buffers(self) -> Sequence[Tensor]:
        """See `octavo.worker_proc.runners.host.Forward`."""
        return buffers_of(self._caches)

    @property
    def state_buffers(self) -> Sequence[Tensor]:
        """See `octavo.worker_proc.runners.host.Forward`."""
        return self._states.buffers if self._states is not None else ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all activations of the largest step."""
        return sum(program.num_bytes for program in self.programs) + (
            self.attention.workspace_bytes if self.attention else 0
        )

    def warm_up(self) -> int:
        """Return 0: nothing is captured."""
        return 0

    def run(self, inputs: StepInputs) -> None:
        """See `octavo.worker_proc.runners.host.Forward`."""
        if self._given_rows is not None:
            self._given_rows.put(inputs.given)
        if inputs.axes_AT is not None and self._step_angles is not None:
            self._step_angles.put(inputs.axes_AT)
        self._adapters = inputs.adapters
        self._inputs, self._step = inputs, step_arguments(inputs)
        self._run_layers()

    def repeat(self, rows: Ints) -> Tensor:
        """See `octavo.worker_proc.runners.host.Forward`."""
        self._run_layers()
        self._run_head()
        assert self._last_logits_RV is not None, "there was a step"
        return self._last_logits_RV

    def _run_layers(self) -> None:
        self.layers.run(self._step, self._threads_of_layers(self._step.num_rows))

    def join_step(self) -> None:
        """See `octavo.worker_proc.executor.runner.Runner`."""
        if self._is_lock_step:
            self.layers.run(self._no_rows, self._threads_of_layers(0))

    def logits(self, rows: Ints) -> Tensor:
        """See `octavo.worker_proc.runners.host.Forward`."""
        self._chosen = step = StepArguments(num_rows=len(rows), token_ids=address(rows))
        step.rows = rows  # keeps the array alive: the struct stores only addresses
        if self._adapters is not None:
            set_adapters(step, self._adapters.of_rows(rows))
        self._run_head()
        assert self._logits_RV is not None, "the last stage has the logits"
        self._last_logits_RV = self._logits_RV[: len(rows)]
        return self._last_logits_RV

    def _run_head(self) -> None:
        head = self.head
        assert head is not None, "the last stage has the logits"
        head.run(self._chosen, self._threads.choose(head.work * self._chosen.num_rows))

    @property
    def features(self) -> Sequence[Tensor]:
        """See `octavo.worker_proc.runners.host.Forward`."""
        assert self._features, "a model with features"
        return self._features

    @property
    def cross_queries(self) -> Mapping[int, Tensor]:
        """See `octavo.worker_proc.runners.host.Forward`."""
        return self._cross_queries

    def _threads_of_layers(self, num_rows: int) -> int:
        # In lock step, experts here may get tokens of other engines, whose number is not known yet.
        return self._threads.choose(self.layers.work * (self.layers.max_rows if self._is_lock_step else num_rows))

    def choose_threads(self, work: int) -> int:
        """See `octavo.worker_proc.runners.host.Forward`."""
        return self._threads.choose(work)
