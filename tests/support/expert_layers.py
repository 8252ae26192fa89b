"""Layers of experts for tests: packed in any way, and computed as a program."""

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels.embedding import embedding
from octavo.kernels.experts import ExpertAdapters, ExpertExchange, PackedExperts, experts
from octavo.kernels.experts.cases import Layer
from octavo.kernels.linear import PackedLinear
from octavo.kernels.lora.rows import GroupedRows
from octavo.kernels.native.arguments import StepArguments
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.passes import fuse
from octavo.kernels.native.program import Program
from octavo.kernels.native.recorder import ProgramRecorder
from octavo.kernels.native.value import as_tensor, value_of
from octavo.kernels.routing import route

Pack = Callable[[Tensor, Tensor | None], PackedLinear]


def pack_experts(
    layer: Layer, weights: dict[str, Tensor], pack: Pack, dtype: torch.dtype = torch.float32, own: range | None = None
) -> PackedExperts:
    """Pack the experts `own` of a layer, all by default."""
    own = range(layer.num_experts) if own is None else own
    parts = {name: tensor.to(dtype) for name, tensor in weights.items()}

    def packed(name: str, bias: str) -> list[PackedLinear]:
        return [pack(parts[name][expert], parts[bias][expert] if bias in parts else None) for expert in own]

    return PackedExperts(
        layer.num_experts,
        packed("gate_EID", "gate_bias_EI") if "gate_EID" in parts else [],
        packed("up_EID", "up_bias_EI"),
        packed("down_EDI", ""),
        layer.activation,
        parts.get("down_bias_ED"),
        own.start,
    )


class ExpertsProgram:
    """A program that looks up hidden states and router logits, and computes a layer of experts; adds the hidden states.

    Args:
        library: where the operations are.
        layer: layer of the experts.
        packed: their weights.
        x: hidden states by token id, of the dtype of the model.
        logits: logits of the router, by token id.
        exchange: see `experts`.
        engines: see `experts`.
        adapters: see `experts`.
    """

    def __init__(
        self,
        library: NativeLibrary,
        layer: Layer,
        packed: PackedExperts,
        x: Tensor,
        logits: Tensor,
        exchange: Callable[[Tensor], Tensor] | None = None,
        engines: ExpertExchange | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> None:
        recorder = ProgramRecorder(x.dtype)
        ids = as_tensor(recorder.token_ids)
        hidden = embedding(ids, x)
        routing = route(embedding(ids, logits), layer.rule)
        out = hidden + experts(hidden, routing, packed, exchange, engines, adapters)
        self._program = Program(library, fuse(recorder.nodes, [value_of(out)]), [value_of(out)], len(x))
        self.operations = self._program.operations

    def run(self, tokens: list[int], num_threads: int = 1, grouped: GroupedRows | None = None) -> Tensor:
        """Return the layer's output for some tokens; `grouped`: which of them have adapters."""
        ids = torch.tensor(tokens)
        step = StepArguments(num_rows=len(ids), token_ids=ids.data_ptr())
        if grouped is not None:
            step.adapter_rows = grouped.rows_A.ctypes.data
            step.adapter_starts = grouped.starts_S.ctypes.data
            step.num_adapters = len(grouped.starts_S) - 1
        self._program.run(step, num_threads)
        return self._program.results[0][: len(ids)].clone()
