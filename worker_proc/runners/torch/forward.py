"""Runs a model operation by operation, through torch or with native products and attention."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from octavo.worker_proc.attention.native import NativeCacheAttention
from octavo.worker_proc.attention.paged import PagedCacheAttention
from octavo.worker_proc.batch.inputs import AdapterInputs, Ints, StepInputs
from octavo.worker_proc.models.base import Model


class TorchForward:
    """The `Forward` of a model that is not recorded."""

    programs = None

    def __init__(self, model: Model, attention: PagedCacheAttention | NativeCacheAttention, max_model_len: int) -> None:
        self._model: Model | None = None
        self._attention = attention
        self._max_model_len = max_model_len
        self.use_model(model)
        self._hidden_TD: Tensor | None = None
        self._inputs: StepInputs | None = None
        self._adapters: AdapterInputs | None = None

    @property
    def cache_buffers(self) -> Sequence[Tensor]:
        """See `octavo.worker_proc.runners.host.Forward`."""
        return self._attention.caches

    @property
    def state_buffers(self) -> Sequence[Tensor]:
        """See `octavo.worker_proc.runners.host.Forward`."""
        return self._attention.state_buffers

    def use_model(self, model: Model | None) -> None:
        """See `octavo.worker_proc.runners.host.Forward`."""
        self._model = model
        if model is not None:
            model.prepare(self._max_model_len)

    def warm_up(self) -> int:
        """Return 0: nothing is captured."""
        return 0

    def run(self, inputs: StepInputs) -> None:
        """See `octavo.worker_proc.runners.host.Forward`."""
        assert self._model is not None, "a step without a model"
        self._inputs = inputs
        if self._model.given_rows is not None:
            self._model.given_rows.put(inputs.given)
        if inputs.axes_AT is not None and self._model.step_angles is not None:
            self._model.step_angles.put(inputs.axes_AT)
        self._attention.plan(inputs)
        self._adapters = inputs.adapters
        self._set_rows(inputs.adapters)
        token_ids_T, positions_T = torch.from_numpy(inputs.token_ids_T), torch.from_numpy(inputs.positions_T)
        self._hidden_TD = self._model.forward(token_ids_T, positions_T, self._attention)

    def logits(self, rows: Ints) -> Tensor:
        """See `octavo.worker_proc.runners.host.Forward`."""
        assert self._model is not None and self._hidden_TD is not None, "run() comes before logits(), on the last stage"
        self._set_rows(None if self._adapters is None else self._adapters.of_rows(rows))
        return self._model.logits(self._hidden_TD[torch.from_numpy(rows)]).float()

    def repeat(self, rows: Ints) -> Tensor:
        """See `octavo.worker_proc.runners.host.Forward`."""
        assert self._inputs is not None, "there was a step"
        self.run(self._inputs)
        return self.logits(rows)

    @property
    def features(self) -> Sequence[Tensor]:
        """See `octavo.worker_proc.runners.host.Forward`."""
        assert self._model is not None and self._model.features is not None, "a model with features"
        return self._model.features.results

    @property
    def cross_queries(self) -> Mapping[int, Tensor]:
        """See `octavo.worker_proc.runners.host.Forward`."""
        assert isinstance(self._attention, PagedCacheAttention), "a model with cross-attention"
        return {layer: q_TNH.float() for layer, q_TNH in self._attention.cross_queries.items()}

    def _set_rows(self, adapters: AdapterInputs | None) -> None:
        if self._model is not None and self._model.adapter_rows is not None:
            self._model.adapter_rows.grouped = None if adapters is None else adapters.grouped()

    def join_step(self) -> None:
        """See `octavo.worker_proc.executor.runner.Runner`. Engines that compute through torch do not divide experts."""

    def choose_threads(self, work: int) -> int:
        """Return 1: between two runs only sampling is native."""
        return 1
