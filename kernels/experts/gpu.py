"""`experts` on a GPU: launches the kernels of `gpu_kernels`. Their grids depend on the number of tokens alone."""

from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor

from octavo.kernels.experts.adapters import ExpertAdapters
from octavo.kernels.experts.gpu_kernels import combine_kernel, down_kernel, gate_up_kernel, sort_kernel
from octavo.kernels.experts.weights import PackedExperts
from octavo.kernels.linear import PackedLinear
from octavo.kernels.linear.gpu import ALIGNMENT, LibraryLinear
from octavo.kernels.linear.gpu_tiles import INPUTS_BLOCK
from octavo.kernels.lora.gpu import GpuLora, PairSlots
from octavo.kernels.routing import Routing

_FEW_ROWS, _MANY_ROWS = 64, 128
"""Positions of a tile, by how many an expert has on average. Hopper's `wgmma` has no smaller tiles than 64."""
_GATE_UP_OUTPUTS, _DOWN_OUTPUTS = 64, 128
"""Of a tile. One of gates and ups has as many columns of both."""
_SORT_BLOCK, _COMBINE_BLOCK = 4096, 1024
_NUM_STAGES = {2: 4, 4: 2}
"""By the element size: about 100 KB are on their way in a program, and two programs share a multiprocessor."""


class Tables(NamedTuple):
    """The addresses of the weights of each expert; int64."""

    gates: Tensor
    """Those of the ups if there are no gates; they are not read."""
    ups: Tensor
    downs: Tensor
    gate_biases: Tensor
    """Zeros if there are none."""
    up_biases: Tensor


class Lists(NamedTuple):
    """Slots by expert, and tiles of them; int32. Only the first `num_tiles` tiles are set."""

    num_tiles: Tensor
    experts: Tensor
    """Of each tile, counted from the first one that is here."""
    starts: Tensor
    """The first position of each tile."""
    ends: Tensor
    slots: Tensor
    """By position."""


_TABLES: "WeakKeyDictionary[PackedExperts, Tables]" = WeakKeyDictionary()


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
    # The outputs of experts that other ranks have are zeros.
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
    """Compute the outputs of all slots whose experts are here."""
    changes = None if adapters is None else _Changes(adapters, x_TD, expert_TK, packed.own)
    tables, inner = _tables(packed), packed.intermediate
    num_slots, num_own, top_k = expert_TK.numel(), len(packed.own), expert_TK.shape[1]
    rows = _FEW_ROWS if num_slots <= _FEW_ROWS * num_own or x_TD.element_size() == 4 else _MANY_ROWS
    lists, max_tiles = _sorted(expert_TK, packed, rows)
    inputs = INPUTS_BLOCK[x_TD.element_size()]
    options = {
        "ROWS": rows,
        "INPUTS": inputs,
        "num_warps": rows // 16,
        "num_stages": _NUM_STAGES[x_TD.element_size()],
    }
    activated_PI = x_TD.new_empty(num_slots, inner)
    gate_up_kernel[(max_tiles * triton.cdiv(inner, _GATE_UP_OUTPUTS),)](
        x_TD,
        tables,
        activated_PI,
        lists,
        changes and changes.delta_SI,
        changes and changes.pairs.slots_S,
        inner,
        packed.width,
        TOP_K=top_k,
        HAS_GATE=bool(packed.gates),
        HAS_BIAS=_dense(packed.ups[0]).bias_O is not None,
        IS_CLAMPED=packed.activation == "clamped_swiglu",
        IS_EVEN=packed.width % inputs == 0,
        OUTPUTS=_GATE_UP_OUTPUTS,
        **options,
    )
    down_kernel[(max_tiles * triton.cdiv(packed.width, _DOWN_OUTPUTS),)](
        activated_PI,
        tables,
        output_SD,
        lists,
        packed.width,
        inner,
        BY_SLOT=changes is not None,
        IS_EVEN=inner % inputs == 0,
        OUTPUTS=_DOWN_OUTPUTS,
        **options,
    )
    if changes is not None:
        changes.downs.add_pairs(activated_PI, output_SD, changes.pairs)


class _Changes:
    """What the adapters of tokens change.

    Args:
        adapters: of the layer.
        x_TD: hidden states.
        expert_TK: of every token.
        own: the experts that are here.
    """

    def __init__(self, adapters: ExpertAdapters, x_TD: Tensor, expert_TK: Tensor, own: range) -> None:
        gates_and_ups, downs, slots_T = adapters.gates_and_ups, adapters.downs, adapters.rows.slots_T
        assert isinstance(gates_and_ups, GpuLora) and isinstance(downs, GpuLora) and slots_T is not None
        self.pairs = PairSlots(slots_T, expert_TK, own)
        self.downs = downs
        self.delta_SI = gates_and_ups.new_pairs(x_TD, self.pairs)
        """Added to gates and ups."""


def _sorted(expert_TK: Tensor, packed: PackedExperts, rows: int) -> tuple[Lists, int]:
    """Return the slots by expert, and the number of tiles that there can be at most."""
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


def _tables(packed: PackedExperts) -> Tables:
    """Return the addresses of the weights; the first call for a layer copies them to the device."""
    if packed not in _TABLES:
        device, gates = packed.ups[0].device, packed.gates or packed.ups
        rows = [_addresses(weights) for weights in (gates, packed.ups, packed.downs)]
        rows += [_bias_addresses(weights) for weights in (gates, packed.ups)]
        _TABLES[packed] = Tables(*torch.tensor(rows, dtype=torch.int64, device=device).unbind(0))
    return _TABLES[packed]


def _addresses(weights: Sequence[PackedLinear]) -> list[int]:
    return [_address(_dense(weight).weight_OI) for weight in weights]


def _bias_addresses(weights: Sequence[PackedLinear]) -> list[int]:
    biases = [_dense(weight).bias_O for weight in weights]
    return [0 if bias_O is None else _address(bias_O) for bias_O in biases]


def _dense(weight: PackedLinear) -> LibraryLinear:
    assert isinstance(weight.product, LibraryLinear), "the weights of experts are packed as grouped ones"
    return weight.product


def _address(tensor: Tensor) -> int:
    address = tensor.data_ptr()
    assert address % ALIGNMENT == 0, "the weights of experts are packed as grouped ones"
    return address
