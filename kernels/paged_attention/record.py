"""Records attention in a program: planned once, then one operation for each layer."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.native.arguments import TYPES, Arguments, Matrix
from octavo.kernels.native.value import Buffer, Form, Node, Recorder, as_tensor, value_of
from octavo.kernels.paged_attention.native import PagedAttentionArguments, PlanAttentionArguments, ShapeArguments

_PAIRED = (TYPES[torch.bfloat16], TYPES[torch.float8_e4m3fn])
"""Cache types that are multiplied as bfloat16."""


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Memory shared by the layers of one program: the list of work items, and partial sums."""

    shape: ShapeArguments
    memory: Tensor
    max_context: int
    """Keys of the longest request."""


def record_plan(recorder: Recorder, workspace: Workspace) -> None:
    """Record the planning of a step, which all its layers read."""

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        memory = workspace.memory
        return PlanAttentionArguments(workspace.shape, memory.data_ptr(), memory.nbytes, workspace.max_context)

    recorder.append_effect(Node("plan_attention", [], [], bind, is_row_wise=False, keep_alive=[workspace]))


def record(
    q_TNH: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    workspace: Workspace,
    sinks_N: Tensor | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """Record the attention of one layer. Its keys and values must have been stored, divided by `scales`."""
    q = value_of(q_TNH)
    num_heads, layout = workspace.shape.num_heads, workspace.shape.layout
    dims = num_heads, layout.key_value_dim or layout.head_dim
    width = math.prod(dims)
    sinks = None if sinks_N is None else sinks_N.float().contiguous()

    def bind(inputs: list[Matrix], outputs: list[Matrix]) -> Arguments:
        return PagedAttentionArguments(
            inputs[0],
            outputs[0],
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            workspace.shape,
            workspace.memory.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            *scales,
        )

    node = Node(
        "paged_attention",
        [q],
        [Buffer(width)],
        bind,
        is_row_wise=False,
        mixes_rows=True,
        # The operation rounds its queries to bfloat16 anyway, so storing them in bfloat16 halves the bytes read.
        input_form=Form(torch.bfloat16) if workspace.shape.layout.type in _PAIRED else None,
        keep_alive=[k_cache, v_cache, workspace, sinks],
    )
    return as_tensor(q.recorder.append(node, dims))
