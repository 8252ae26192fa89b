"""`experts` on a GPU: launches the kernels of `gpu_kernels`. Their grids depend only on the number of tokens."""

from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor

from octavo.kernels.dispatch import require
from octavo.kernels.experts import gpu_quantized
from octavo.kernels.experts.adapters import ExpertAdapters
from octavo.kernels.experts.gpu_kernels import combine_kernel, down_kernel, gate_up_kernel, sort_kernel
from octavo.kernels.experts.gpu_quantized import Deltas, QuantizedWeights, Tiles
from octavo.kernels.experts.weights import PackedExperts
from octavo.kernels.linear import PackedLinear
from octavo.kernels.linear.gpu import ALIGNMENT, LibraryLinear
from octavo.kernels.linear.gpu_quantized import ROWS as QUANTIZED_ROWS
from octavo.kernels.linear.gpu_quantized import QuantizedProduct
from octavo.kernels.linear.gpu_tiles import INPUTS_BLOCK
from octavo.kernels.lora.gpu import GpuLora, PairSlots
from octavo.kernels.routing import Routing

_FEW_ROWS, _MANY_ROWS = 64, 128
"""Positions in a tile, chosen by the average number per expert. Hopper's `wgmma` has no tiles smaller than 64."""
_GATE_UP_OUTPUTS, _DOWN_OUTPUTS = 64, 128
"""Outputs of a tile. A tile of gates and ups has this many columns of each."""
_SORT_BLOCK, _COMBINE_BLOCK = 4096, 1024
_NUM_STAGES = {2: 4, 4: 2}
"""Pipeline stages by element size: about 100 KB are in flight per program, and two programs share a multiprocessor."""


class Tables(NamedTuple):
    """Addresses of each expert's 16-bit or 32-bit weights; int64. Zeros if the weights are quantized."""

    gates: Tensor
    """Addresses of the ups if there are no gates; not read then."""
    ups: Tensor
    downs: Tensor
    gate_biases: Tensor
    """Zeros if there are none."""
    up_biases: Tensor


class Lists(NamedTuple):
    """Slots sorted by expert, and tiles of them; int32. Only the first `num_tiles` tiles are set."""

    num_tiles: Tensor
    experts: Tensor
    """Expert of each tile, counted from the first expert on this rank."""
    starts: Tensor
    """The first position of each tile."""
    ends: Tensor
    slots: Tensor
    """Slot of each position."""


class Weights(NamedTuple):
    """The weights of a layer's experts as the kernels read them."""

    tables: Tables
    gates: QuantizedWeights | None
    """Quantized gates; `None` if they are not quantized, or there are none."""
    ups: QuantizedWeights | None
    downs: QuantizedWeights | None


_WEIGHTS: "WeakKeyDictionary[PackedExperts, Weights]" = WeakKeyDictionary()


def experts(
    x_TD: Tensor,
    routing: Routing,
    packed: PackedExperts,
    exchange: Callable[[Tensor], Tensor] | None,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """See `octavo.kernels.experts.experts`."""
    x_TD = x_TD.contiguous()
    num_tokens, top_k = routing.expert_TK.shape
    num_slots, num_own, width = num_tokens * top_k, len(packed.own), packed.width
    # The outputs of experts on other ranks are zeros.
    new = x_TD.new_empty if num_own == packed.num_experts else x_TD.new_zeros
    output_SD = new(num_slots, width)
    if num_slots:
        _multiply(x_TD, routing.expert_TK, packed, output_SD, adapters)
    output_TC = output_SD.view(num_tokens, top_k * width)
    output_TC = output_TC if exchange is None else exchange(output_TC).contiguous()
    out_TD = x_TD.new_empty(num_tokens, width)
    if num_slots:
        combine_kernel[(num_tokens, triton.cdiv(width, _COMBINE_BLOCK))](
            output_TC,
            routing.expert_TK,
            routing.weight_TK,
            packed.down_bias_ED,
            out_TD,
            width,
            TOP_K=top_k,
            BLOCK=_COMBINE_BLOCK,
        )
    return out_TD


def _multiply(
    x_TD: Tensor, expert_TK: Tensor, packed: PackedExperts, output_SD: Tensor, adapters: ExpertAdapters | None
) -> None:
    """Compute the outputs of all slots whose experts are on this rank."""
    changes = None if adapters is None else _Changes(adapters, x_TD, expert_TK, packed.own)
    weights, num_slots = _weights(packed), expert_TK.numel()
    rows = _tile_rows(weights, num_slots, len(packed.own), x_TD.element_size())
    tiles = Tiles(*_sorted(expert_TK, packed, rows), rows)
    activated_PI = x_TD.new_empty(num_slots, packed.intermediate)
    top_k, is_clamped = expert_TK.shape[1], packed.activation == "clamped_swiglu"
    deltas = (None, None) if changes is None else (changes.delta_SI, changes.pairs.slots_S)
    if weights.ups is None:
        _multiply_gates_and_ups(x_TD, packed, weights.tables, tiles, deltas, top_k, activated_PI, is_clamped=is_clamped)
    else:
        gpu_quantized.multiply_gates_and_ups(
            x_TD, weights.gates, weights.ups, tiles, deltas, top_k, activated_PI, is_clamped=is_clamped
        )
    by_slot = changes is not None
    if weights.downs is None:
        _multiply_downs(activated_PI, packed, weights.tables, tiles, output_SD, by_slot=by_slot)
    else:
        gpu_quantized.multiply_downs(activated_PI, weights.downs, tiles, output_SD, by_slot=by_slot)
    if changes is not None:
        changes.downs.add_pairs(activated_PI, output_SD, changes.pairs)


def _tile_rows(weights: Weights, num_slots: int, num_own: int, element_bytes: int) -> int:
    """Return the number of positions in a tile."""
    others = [each for each in (weights.ups, weights.downs) if each is not None]
    if not others:
        return _FEW_ROWS if num_slots <= _FEW_ROWS * num_own or element_bytes == 4 else _MANY_ROWS
    sizes = QUANTIZED_ROWS if len(others) == 2 else (_FEW_ROWS, _MANY_ROWS)
    return gpu_quantized.tile_rows(weights.gates, others, sizes, num_slots, num_own)


def _multiply_gates_and_ups(
    x_TD: Tensor,
    packed: PackedExperts,
    tables: Tables,
    tiles: Tiles,
    deltas: Deltas,
    top_k: int,
    out_PI: Tensor,
    *,
    is_clamped: bool,
) -> None:
    inputs = INPUTS_BLOCK[x_TD.element_size()]
    gate_up_kernel[(tiles.most * triton.cdiv(packed.intermediate, _GATE_UP_OUTPUTS),)](
        x_TD,
        tables,
        out_PI,
        tiles.lists,
        *deltas,
        packed.intermediate,
        packed.width,
        TOP_K=top_k,
        HAS_GATE=bool(packed.gates),
        HAS_BIAS=_dense(packed.ups[0]).bias_O is not None,
        IS_CLAMPED=is_clamped,
        IS_EVEN=packed.width % inputs == 0,
        OUTPUTS=_GATE_UP_OUTPUTS,
        **_options(x_TD, tiles),
    )


def _multiply_downs(
    x_PI: Tensor, packed: PackedExperts, tables: Tables, tiles: Tiles, output_SD: Tensor, *, by_slot: bool
) -> None:
    inputs = INPUTS_BLOCK[x_PI.element_size()]
    down_kernel[(tiles.most * triton.cdiv(packed.width, _DOWN_OUTPUTS),)](
        x_PI,
        tables,
        output_SD,
        tiles.lists,
        packed.width,
        packed.intermediate,
        BY_SLOT=by_slot,
        IS_EVEN=packed.intermediate % inputs == 0,
        OUTPUTS=_DOWN_OUTPUTS,
        **_options(x_PI, tiles),
    )


class _Changes:
    """Sums that the adapters of tokens add.

    Args:
        adapters: adapters of the layer.
        x_TD: hidden states.
        expert_TK: experts of every token.
        own: experts on this rank.
    """

    def __init__(self, adapters: ExpertAdapters, x_TD: Tensor, expert_TK: Tensor, own: range) -> None:
        gates_and_ups, downs, slots_T = adapters.gates_and_ups, adapters.downs, adapters.rows.slots_T
        assert isinstance(gates_and_ups, GpuLora) and isinstance(downs, GpuLora) and slots_T is not None
        self.pairs = PairSlots(slots_T, expert_TK, own)
        self.downs = downs
        self.delta_SI = gates_and_ups.new_pairs(x_TD, self.pairs)
        """Added to gates and ups, by slot."""


def _options(x: Tensor, tiles: Tiles) -> dict[str, int]:
    size = x.element_size()
    return {
        "ROWS": tiles.rows,
        "INPUTS": INPUTS_BLOCK[size],
        "num_warps": tiles.rows // 16,
        "num_stages": _NUM_STAGES[size],
    }


def _sorted(expert_TK: Tensor, packed: PackedExperts, rows: int) -> tuple[Lists, int]:
    """Return the slots sorted by expert, and the maximum number of tiles."""
    num_slots, num_own = expert_TK.numel(), len(packed.own)
    max_tiles = min(num_slots, num_own) + num_slots // rows
    # All lists are aligned to 16 bytes, so that kernels are compiled once.
    lengths = [-(-length // 4) * 4 for length in (1, max_tiles, max_tiles, max_tiles, num_slots)]
    lists = Lists(*torch.empty(sum(lengths), dtype=torch.int32, device=expert_TK.device).split(lengths))
    sort_kernel[(num_own,)](
        expert_TK,
        lists,
        packed.own.start,
        num_slots,
        num_own,
        ROWS=rows,
        BINS=max(triton.next_power_of_2(num_own), 32),
        BLOCK=_SORT_BLOCK,
        num_warps=8,
    )
    return lists, max_tiles


def _weights(packed: PackedExperts) -> Weights:
    """Return the weights; the first call for a layer copies their addresses to the device."""
    if packed not in _WEIGHTS:
        gates, ups, downs = (
            QuantizedWeights.of(weights) if weights else None for weights in (packed.gates, packed.ups, packed.downs)
        )
        require(
            not packed.gates or (gates is None) == (ups is None),
            "experts: either gates or ups of a layer are quantized; --quantization none dequantizes them",
        )
        dense = packed.gates or packed.ups
        rows = [_addresses(weights) for weights in (dense, packed.ups, packed.downs)]
        rows += [_bias_addresses(weights) for weights in (dense, packed.ups)]
        tables = Tables(*torch.tensor(rows, dtype=torch.int64, device=packed.ups[0].device).unbind(0))
        _WEIGHTS[packed] = Weights(tables, gates, ups, downs)
    return _WEIGHTS[packed]


def _addresses(weights: Sequence[PackedLinear]) -> list[int]:
    return [_address(_dense(weight).weight_OI) if _is_dense(weight) else 0 for weight in weights]


def _bias_addresses(weights: Sequence[PackedLinear]) -> list[int]:
    biases = [_dense(weight).bias_O if _is_dense(weight) else None for weight in weights]
    return [0 if bias_O is None else _address(bias_O) for bias_O in biases]


def _is_dense(weight: PackedLinear) -> bool:
    return not isinstance(weight.product, QuantizedProduct)


def _dense(weight: PackedLinear) -> LibraryLinear:
    assert isinstance(weight.product, LibraryLinear), "the weights of experts are packed as grouped ones"
    return weight.product


def _address(tensor: Tensor) -> int:
    address = tensor.data_ptr()
    assert address % ALIGNMENT == 0, "the weights of experts are packed as grouped ones"
    return address
