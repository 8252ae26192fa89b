"""The Triton kernels of experts with quantized weights. A token's bits depend on neither other tokens nor tiles.

Lists of slots and tiles are those of `gpu_kernels`, products with codes those of `octavo.kernels.linear`: all blocks of
inputs in ascending order in one chain, never split. Every expert has its own weights, found through tables.
"""

import triton
import triton.language as tl

from octavo.kernels.experts.gpu_kernels import activated, tile_of_program
from octavo.kernels.linear.gpu_quantized_kernels import scaled_sums, sum_split
from octavo.kernels.linear.gpu_quantized_layout import TILE_OUTPUTS

_OUTPUTS = tl.constexpr(TILE_OUTPUTS)


@triton.jit
def _address(table_ptr, expert, dtype: tl.constexpr):
    return tl.multiple_of(tl.load(table_ptr + expert).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _results(
    x_ptr,
    row_scale_ptr,
    table,
    expert,
    tile_outputs,
    row_places,
    rows,
    num_outputs,
    num_inputs,
    num_blocks,
    num_row_groups,
    bias_type: tl.constexpr,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Return the results of a tile, float32, outputs by rows. `bias_type` is `None` if there is no bias."""
    word_dtype: tl.constexpr = FORM.word_dtype
    scale_ptr = _address(table.scales, expert, tl.int32)
    sums = sum_split(
        x_ptr,
        row_scale_ptr,
        _address(table.words, expert, word_dtype),
        scale_ptr,
        tile_outputs,
        row_places,
        rows,
        0,
        num_blocks,
        num_inputs,
        num_blocks,
        num_row_groups,
        FORM,
        ROWS,
        STEP,
        NUM_STAGES,
    )
    HAS_BIAS: tl.constexpr = bias_type is not None
    bias_ptr = scale_ptr
    if HAS_BIAS:
        bias_ptr = _address(table.biases, expert, bias_type)
    return scaled_sums(sums, row_scale_ptr, scale_ptr, bias_ptr, tile_outputs, rows, num_outputs, HAS_BIAS, FORM)


@triton.jit
def _with_delta(results, delta_ptr, adapter_ptr, slots, width, outputs, is_output):
    """Add the adapters' deltas to the slots that have one; `width`: elements of a slot."""
    has_adapter = (tl.load(adapter_ptr + slots) >= 0)[None, :]
    places = (slots * width)[None, :] + outputs[:, None]
    delta = tl.load(delta_ptr + places, mask=has_adapter & is_output[:, None], other=0.0).to(tl.float32)
    return tl.where(has_adapter, results + delta, results)


@triton.jit  # long: arguments take a line each
def quantized_gate_up_kernel(
    x_ptr,
    row_scale_ptr,
    gates,
    ups,
    out_ptr,
    lists,
    delta_ptr,
    adapter_ptr,
    num_outputs,
    num_inputs,
    gate_blocks,
    up_blocks,
    num_row_groups,
    TOP_K: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Compute the activation of gates and ups, or of ups alone if GATE is `None`: one row per position; with adapters,
    one row per slot. `delta_ptr`, `adapter_ptr`: see `gate_up_kernel`."""
    expert, positions, is_row, slots, tile_outputs = tile_of_program(lists, num_outputs, ROWS, _OUTPUTS)
    if expert < 0:
        return
    tokens = slots // TOP_K
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    bias_type: tl.constexpr = dtype if HAS_BIAS else None
    if GATE is not None:
        gate = _results(
            x_ptr,
            row_scale_ptr,
            gates,
            expert,
            tile_outputs,
            tokens * num_inputs,
            tokens,
            num_outputs,
            num_inputs,
            gate_blocks,
            num_row_groups,
            bias_type,
            GATE,
            ROWS,
            STEP,
            NUM_STAGES,
        )
    up = _results(
        x_ptr,
        row_scale_ptr,
        ups,
        expert,
        tile_outputs,
        tokens * num_inputs,
        tokens,
        num_outputs,
        num_inputs,
        up_blocks,
        num_row_groups,
        bias_type,
        UP,
        ROWS,
        STEP,
        NUM_STAGES,
    )
    outputs = tile_outputs + tl.arange(0, _OUTPUTS)
    is_output = outputs < num_outputs
    if delta_ptr is not None:
        if GATE is not None:
            gate = _with_delta(gate, delta_ptr, adapter_ptr, slots, 2 * num_outputs, outputs, is_output)
            up = _with_delta(up, delta_ptr + num_outputs, adapter_ptr, slots, 2 * num_outputs, outputs, is_output)
        else:
            up = _with_delta(up, delta_ptr, adapter_ptr, slots, num_outputs, outputs, is_output)
        positions = slots
    if GATE is not None:
        results = activated(gate, up, IS_CLAMPED)
    else:
        up = tl.maximum(up, 0.0)
        results = up * up
    places = (positions * num_outputs)[:, None] + outputs[None, :]
    tl.store(out_ptr + places, results.to(dtype).T, mask=is_row[:, None] & is_output[None, :])


@triton.jit
def quantized_down_kernel(
    x_ptr,
    row_scale_ptr,
    downs,
    out_ptr,
    lists,
    num_outputs,
    num_inputs,
    num_blocks,
    num_row_groups,
    BY_SLOT: tl.constexpr,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Compute the outputs of experts, one row per slot, from rows by position or by slot."""
    expert, positions, is_row, slots, tile_outputs = tile_of_program(lists, num_outputs, ROWS, _OUTPUTS)
    if expert < 0:
        return
    if BY_SLOT:
        positions = slots
    results = _results(
        x_ptr,
        row_scale_ptr,
        downs,
        expert,
        tile_outputs,
        positions * num_inputs,
        positions,
        num_outputs,
        num_inputs,
        num_blocks,
        num_row_groups,
        None,
        FORM,
        ROWS,
        STEP,
        NUM_STAGES,
    )
    outputs = tile_outputs + tl.arange(0, _OUTPUTS)
    places = (slots * num_outputs)[:, None] + outputs[None, :]
    is_number = is_row[:, None] & (outputs < num_outputs)[None, :]
    tl.store(out_ptr + places, results.to(out_ptr.dtype.element_ty).T, mask=is_number)
