"""The Triton kernels of `experts`. A token's bits depend on neither the other tokens nor the tiles.

Slots are the (token, expert) pairs of a step; slot s is expert s % TOP_K of token s // TOP_K. `sort_kernel` gives every
slot a position, with those of an expert adjacent, and lists tiles of positions with the same expert. Each program of
the two products computes a tile of positions by a tile of outputs, with all inputs in ascending order in one chain of
tensor core instructions. So the tiles do not affect the order of sums. `combine_kernel` adds the outputs of each token
in the order of its experts.

Launches can be captured: only the work of programs depends on numbers that only the device knows. Each expert has its
own weights, found through tables of addresses.
"""

import triton
import triton.language as tl

from octavo.kernels.experts.reference import SWIGLU_ALPHA, SWIGLU_LIMIT
from octavo.kernels.linear.gpu_kernels import place_of_tile

_LIMIT, _ALPHA = tl.constexpr(SWIGLU_LIMIT), tl.constexpr(SWIGLU_ALPHA)


@triton.jit(do_not_specialize=["num_slots"])
def sort_kernel(
    expert_ptr,
    lists,
    first_own,
    num_slots,
    NUM_OWN: tl.constexpr,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program counts the slots of all experts, finds those of one expert, and lists their tiles."""
    own = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, num_slots, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        experts = tl.load(expert_ptr + slots, mask=slots < num_slots, other=-1) - first_own
        counts += tl.histogram(experts, BINS, mask=(experts >= 0) & (experts < NUM_OWN))
    tiles = tl.cdiv(counts, ROWS)
    count = tl.sum(tl.where(bins == own, counts, 0), axis=0)
    position = tl.sum(tl.where(bins < own, counts, 0), axis=0)
    tile = tl.sum(tl.where(bins < own, tiles, 0), axis=0)
    if own == 0:
        tl.store(lists.num_tiles, tl.sum(tiles, axis=0))
    for first in range(0, count, ROWS):
        tl.store(lists.experts + tile, own)
        tl.store(lists.starts + tile, position + first)
        tl.store(lists.ends + tile, position + tl.minimum(first + ROWS, count))
        tile += 1
    if count > 0:
        for start in range(0, num_slots, BLOCK):
            slots = start + tl.arange(0, BLOCK)
            experts = tl.load(expert_ptr + slots, mask=slots < num_slots, other=-1) - first_own
            is_mine = experts == own
            places = position + tl.cumsum(is_mine.to(tl.int32), axis=0) - 1
            tl.store(lists.slots + places, slots, mask=is_mine)
            position += tl.sum(is_mine.to(tl.int32), axis=0)


@triton.jit
def tile_of_program(lists, num_outputs, ROWS: tl.constexpr, OUTPUTS: tl.constexpr):
    """Return expert, positions, which positions exist, slots, and the first output of a program's tile; the expert is
    -1 if it has no tile."""
    num_tiles = tl.load(lists.num_tiles)
    has_tile = tl.program_id(0) < num_tiles * tl.cdiv(num_outputs, OUTPUTS)
    first_row, first_output = place_of_tile(tl.program_id(0), num_tiles * ROWS, num_outputs, ROWS, OUTPUTS)
    tile = first_row // ROWS
    expert = tl.load(lists.experts + tile, mask=has_tile, other=-1)
    end = tl.load(lists.ends + tile, mask=has_tile, other=1)
    positions = tl.load(lists.starts + tile, mask=has_tile, other=0) + tl.arange(0, ROWS)
    is_row = has_tile & (positions < end)
    # Rows after the last one repeat it: reading the same addresses again costs nothing.
    positions = tl.minimum(positions, end - 1)
    slots = tl.load(lists.slots + positions, mask=has_tile, other=0)
    return expert, positions.to(tl.int64), is_row, slots.to(tl.int64), first_output


@triton.jit
def weight_address(table_ptr, expert, like_ptr):
    """Return the address of an expert's weight or bias, as a pointer of the type of `like`."""
    return tl.multiple_of(tl.load(table_ptr + expert).to(tl.pointer_type(like_ptr.dtype.element_ty)), 16)


@triton.jit
def load_block(ptr, places, inputs, num_inputs, IS_EVEN: tl.constexpr):
    """Return a block of rows by inputs, with 0 after the last input."""
    if IS_EVEN:
        block = tl.load(ptr + places[:, None] + inputs[None, :])
    else:
        block = tl.load(ptr + places[:, None] + inputs[None, :], mask=(inputs < num_inputs)[None, :], other=0.0)
    return block


@triton.jit
def activated(gate, up, IS_CLAMPED: tl.constexpr):
    """See `octavo.kernels.experts.reference.activated`."""
    if IS_CLAMPED:
        gate = tl.minimum(gate, _LIMIT)
        up = tl.minimum(tl.maximum(up, -_LIMIT), _LIMIT) + 1.0
        return gate / (1.0 + tl.exp(-_ALPHA * gate)) * up
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit  # long: arguments take a line each
def gate_up_kernel(
    x_ptr,
    tables,
    out_ptr,
    lists,
    delta_ptr,
    adapter_ptr,
    num_outputs,
    num_inputs,
    TOP_K: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Compute the activation of gates and ups, or of ups alone: one row per position; with adapters, one row per slot.

    `delta_ptr`: what adapters add, for slots whose entry in `adapter_ptr` is not -1; `None` if there are no adapters.
    """
    expert, positions, is_row, slots, first_output = tile_of_program(lists, num_outputs, ROWS, OUTPUTS)
    if expert < 0:
        return
    outputs = first_output + tl.arange(0, OUTPUTS)
    gate_ptr, up_ptr = weight_address(tables.gates, expert, x_ptr), weight_address(tables.ups, expert, x_ptr)
    row_places = slots // TOP_K * num_inputs
    weight_places = tl.minimum(outputs, num_outputs - 1).to(tl.int64) * num_inputs
    tl.assume(num_inputs > 0)  # see `octavo.kernels.linear.gpu_kernels`
    gate_sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    up_sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, num_inputs, INPUTS):
        inputs = start + tl.arange(0, INPUTS)
        rows = load_block(x_ptr, row_places, inputs, num_inputs, IS_EVEN)
        if HAS_GATE:
            gates = load_block(gate_ptr, weight_places, inputs, num_inputs, IS_EVEN)
        ups = load_block(up_ptr, weight_places, inputs, num_inputs, IS_EVEN)
        if HAS_GATE:
            gate_sums = tl.dot(rows, gates.T, gate_sums, input_precision="ieee")
        up_sums = tl.dot(rows, ups.T, up_sums, input_precision="ieee")
    is_output = outputs < num_outputs
    if HAS_BIAS:
        gate_bias_ptr, up_bias_ptr = (
            weight_address(tables.gate_biases, expert, x_ptr),
            weight_address(tables.up_biases, expert, x_ptr),
        )
        if HAS_GATE:
            gate_sums += tl.load(gate_bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
        up_sums += tl.load(up_bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    if delta_ptr is not None:
        has_adapter = (tl.load(adapter_ptr + slots) >= 0)[:, None]
        is_delta = has_adapter & is_output[None, :]
        delta_places = slots[:, None] * (num_outputs * (2 if HAS_GATE else 1)) + outputs[None, :]
        if HAS_GATE:
            gate_delta = tl.load(delta_ptr + delta_places, mask=is_delta, other=0.0).to(tl.float32)
            gate_sums = tl.where(has_adapter, gate_sums + gate_delta, gate_sums)
            delta_places += num_outputs
        up_delta = tl.load(delta_ptr + delta_places, mask=is_delta, other=0.0).to(tl.float32)
        up_sums = tl.where(has_adapter, up_sums + up_delta, up_sums)
        positions = slots
    if HAS_GATE:
        results = activated(gate_sums, up_sums, IS_CLAMPED)
    else:
        up_sums = tl.maximum(up_sums, 0.0)
        results = up_sums * up_sums
    places = (positions * num_outputs)[:, None] + outputs[None, :]
    tl.store(out_ptr + places, results.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def down_kernel(
    x_ptr,
    tables,
    out_ptr,
    lists,
    num_outputs,
    num_inputs,
    BY_SLOT: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Compute the outputs of experts, one row per slot, from rows by position or by slot."""
    expert, positions, is_row, slots, first_output = tile_of_program(lists, num_outputs, ROWS, OUTPUTS)
    if expert < 0:
        return
    outputs = first_output + tl.arange(0, OUTPUTS)
    if BY_SLOT:
        positions = slots
    weight_ptr = weight_address(tables.downs, expert, x_ptr)
    row_places = positions * num_inputs
    weight_places = tl.minimum(outputs, num_outputs - 1).to(tl.int64) * num_inputs
    tl.assume(num_inputs > 0)
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, num_inputs, INPUTS):
        inputs = start + tl.arange(0, INPUTS)
        rows = load_block(x_ptr, row_places, inputs, num_inputs, IS_EVEN)
        weights = load_block(weight_ptr, weight_places, inputs, num_inputs, IS_EVEN)
        sums = tl.dot(rows, weights.T, sums, input_precision="ieee")
    places = (slots * num_outputs)[:, None] + outputs[None, :]
    is_number = is_row[:, None] & (outputs < num_outputs)[None, :]
    tl.store(out_ptr + places, sums.to(out_ptr.dtype.element_ty), mask=is_number)


@triton.jit
def combine_kernel(
    output_ptr, expert_ptr, weight_ptr, bias_ptr, out_ptr, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the weighted outputs of one token, one expert after another; the weights of `NO_EXPERT` are NaN."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(token * TOP_K, (token + 1) * TOP_K):
        output = tl.load(output_ptr + slot * width + columns, mask=is_in, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            bias_row = bias_ptr + tl.maximum(tl.load(expert_ptr + slot), 0).to(tl.int64) * width
            output += tl.load(bias_row + columns, mask=is_in, other=0.0).to(tl.float32)
        total = tl.fma(output, tl.load(weight_ptr + slot) + tl.zeros_like(output), total)
    tl.store(out_ptr + token * width + columns, total.to(out_ptr.dtype.element_ty), mask=is_in)
