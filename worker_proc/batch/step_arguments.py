"""Conversion of a step's arrays to the C++ struct."""

import ctypes
from typing import Any

import numpy.typing as npt

from octavo.kernels.native.arguments import GroupArguments, StepArguments
from octavo.worker_proc.batch.inputs import AdapterInputs, AttentionPieces, StepInputs


def step_arguments(inputs: StepInputs) -> StepArguments:
    """Return the step as a C++ struct. The arrays must outlive it."""
    if inputs.pieces is not None:
        return _step_of_pieces(inputs, inputs.pieces)
    groups = [
        GroupArguments(
            address(group.slot_mapping_T),
            address(table_RP),
            table_RP.shape[1],
            context_lens=None if group.context_lens_R is None else address(group.context_lens_R),
        )
        for group in inputs.groups
        if (table_RP := group.block_table_RP) is not None
    ]
    if (states := inputs.states) is not None:
        sources, destinations = address(states.sources_R), address(states.destinations_R)
        groups.append(GroupArguments(state_sources=sources, state_destinations=destinations))
    if (cross := inputs.cross) is not None:
        assert cross.block_table_RP is not None and cross.context_lens_R is not None, "of cross-attention"
        table, lengths = address(cross.block_table_RP), address(cross.context_lens_R)
        width = cross.block_table_RP.shape[1]
        groups.append(GroupArguments(block_table=table, block_table_width=width, context_lens=lengths))
    step = StepArguments(
        num_rows=len(inputs.token_ids_T),
        token_ids=address(inputs.token_ids_T),
        positions=address(inputs.positions_T),
        num_requests=len(inputs.context_lens),
        query_starts=address(inputs.query_starts),
        context_lens=address(inputs.context_lens),
        groups=(GroupArguments * len(groups))(*groups),
    )
    set_adapters(step, inputs.adapters)
    return step


def _step_of_pieces(inputs: StepInputs, pieces: AttentionPieces) -> StepArguments:
    """Return the step of a model without states and cross-attention, with its requests divided into pieces."""
    assert inputs.states is None and inputs.cross is None, "a model that attends to its own keys alone"
    tables = [group.block_table_RP[pieces.requests_P] for group in inputs.groups if group.block_table_RP is not None]
    groups = [
        GroupArguments(address(group.slot_mapping_T), address(table_PP), table_PP.shape[1])
        for group, table_PP in zip(inputs.groups, tables, strict=True)
    ]
    step = StepArguments(
        num_rows=len(inputs.token_ids_T),
        token_ids=address(inputs.token_ids_T),
        positions=address(inputs.positions_T),
        num_requests=len(pieces.context_lens),
        query_starts=address(pieces.query_starts),
        context_lens=address(pieces.context_lens),
        groups=(GroupArguments * len(groups))(*groups),
        is_span=address(pieces.is_span_P),
    )
    step.tables = tables  # keeps the arrays alive: the struct stores only addresses
    set_adapters(step, inputs.adapters)
    return step


def set_adapters(step: StepArguments, adapters: AdapterInputs | None) -> None:
    """Set which rows of a step have adapters."""
    grouped = None if adapters is None else adapters.grouped()
    if adapters is None or grouped is None:
        return
    step.adapter_rows, step.adapter_starts = address(grouped.rows_A), address(grouped.starts_S)
    step.num_adapters = adapters.num_slots
    step.adapters = grouped  # keeps the arrays alive: the struct stores only addresses


def step_without_rows(num_groups: int) -> StepArguments:
    """Return a step in which this engine has no tokens.

    Args:
        num_groups: number of cache groups, including the one for states.
    """
    query_starts = (ctypes.c_int64 * 1)()
    step = StepArguments(query_starts=ctypes.addressof(query_starts), groups=(GroupArguments * num_groups)())
    step.kept = query_starts  # keeps the array alive: the struct stores only addresses
    return step


def address(array: npt.NDArray[Any]) -> int:
    """Return the address of a contiguous array.

    perf: `array.ctypes.data` runs much more Python, seven times per step.
    """
    assert array.flags.c_contiguous
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
