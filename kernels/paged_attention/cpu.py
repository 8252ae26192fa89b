"""`paged_attention` on the CPU through torch, in matrix products of one shape.

Every product has ROW_TILE query rows and KV_TILE keys, in every step. The rows of a tile are the query heads of one key
head, for one token (decodes) or for as many adjacent tokens as fit (chunks). So a row's scores have the same bits in
every step. The maximum is exact in any order, and tiles are summed in order from position 0; a tile that a row cannot
see adds zero. Only `torch.bmm` over tiles of one shape and elementwise operations are used.

Dimensions besides those of `octavo.kernels`: X tiles of keys, Y tiles of query rows, M rows and W keys of a tile, G
query heads per key head, V elements of a value.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from octavo.kernels.dispatch import require
from octavo.kernels.paged_attention.shape import AttentionShape

ROW_TILE = 16
KV_TILE = 128

_MAX_KEY_NUMBERS = 1 << 21
"""Maximum elements of the keys of one batch of decodes: 8 MiB in float32."""
_MAX_SCORES = 1 << 22
"""Maximum scores of one batch of tiles of a chunk: 16 MiB."""


@dataclass(frozen=True, slots=True)
class _Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    soft_cap: float | None
    slopes_KG1: Tensor | None

    @classmethod
    def of(cls, shape: AttentionShape) -> Self:
        """Return the heads of a shape."""
        slopes = None if shape.slopes is None else torch.tensor(shape.slopes).view(shape.num_kv_heads, -1, 1)
        sizes = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.value_dim
        return cls(*sizes, shape.scale, shape.soft_cap, slopes)

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """M: rows of a tile, the same for all steps of a model."""
        return -(-self.group // ROW_TILE) * ROW_TILE

    @property
    def tokens_per_tile(self) -> int:
        return self.rows // self.group


class CpuPlan:
    """One step's work: decodes of similar length are batched, prefill chunks are computed one by one."""

    def __init__(self, parts: Sequence["_Decodes | _Chunk"], value_dim: int) -> None:
        self._parts = parts
        self._value_dim = value_dim

    def __call__(
        self,
        q_TNH: Tensor,
        k_cache_PSKH: Tensor,
        v_cache_PSKH: Tensor,
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """See `octavo.kernels.paged_attention.PagedAttention`."""
        require(k_scale == v_scale == 1.0, f"paged_attention: a CPU has no caches with scales {k_scale}, {v_scale}")
        out_TNV = q_TNH.new_empty(*q_TNH.shape[:2], self._value_dim)
        for part in self._parts:
            part.run(q_TNH, k_cache_PSKH, v_cache_PSKH, out_TNV, sinks_N)
        return out_TNV


def plan(
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    block_table_RP: Tensor,
    block_size: int,
    shape: AttentionShape,
    is_span_R: Sequence[bool] | None = None,
) -> CpuPlan:
    """See `octavo.kernels.paged_attention.plan`."""
    heads = _Heads.of(shape)
    chunks: list[_Chunk] = []
    decodes: list[_Decode] = []
    for request, context_len in enumerate(context_lens):
        start, end = query_starts[request], query_starts[request + 1]
        first_position = context_len - (end - start)
        first_key = shape.first_key(first_position)
        first_tile = first_key // KV_TILE
        slots_W = _slots(block_table_RP[request], block_size, first_key, context_len)
        if end - start == 1:
            decodes.append(_Decode(start, context_len, first_tile, slots_W))
        else:
            is_span = is_span_R is not None and is_span_R[request]
            chunks.append(_plan_chunk(heads, shape, (start, end), first_position, first_tile, slots_W, is_span=is_span))
    batches = [_plan_decodes(heads, shape, group) for group in _grouped(decodes, heads)]
    return CpuPlan([*batches, *chunks], shape.value_dim)


def workspace_bytes(context_len: int, shape: AttentionShape, dtype: torch.dtype) -> int:
    """Return the bytes that a request with `context_len` keys needs while a planned step runs, for any number of rows.

    Counts keys and values in float32, and the values once more in the cache's dtype; scores, weights and sums for each
    tile of keys, for one batch of query tiles. Scores are counted twice more, because the C library's allocator was
    seen to keep that much.
    """
    heads = _Heads.of(shape)
    num_tiles = -(-context_len // KV_TILE)
    keys = num_tiles * KV_TILE * heads.num_kv_heads
    copied_bytes = dtype.itemsize if dtype != torch.float32 else 0
    gathered = keys * heads.head_dim * (2 * torch.float32.itemsize + copied_bytes)
    scores = max(keys * heads.rows, _MAX_SCORES) * torch.float32.itemsize
    return gathered + 4 * scores + scores * heads.head_dim // KV_TILE


def _slots(block_table_P: Tensor, block_size: int, first_key: int, context_len: int) -> Tensor:
    """Return the cache slots of complete tiles of keys, padded with the slots of the first and the last position.

    The padding is masked, but it must be finite and belong to this request; blocks before the window may not.
    """
    end = -(-context_len // KV_TILE) * KV_TILE
    positions_W = torch.arange(first_key // KV_TILE * KV_TILE, end).clamp_(min=first_key, max=context_len - 1)
    return block_table_P.long()[positions_W // block_size] * block_size + positions_W % block_size


def _gather(cache_PSKH: Tensor, slots: Tensor) -> Tensor:
    """Return the keys or values of some slots in float32; shape: that of `slots`, then KH.

    Products read a head's tile from it in place, so all have the same strides.
    """
    rows = cache_PSKH.flatten(0, 1).index_select(0, slots.flatten())
    return rows.float().view(*slots.shape, *rows.shape[1:])


def _attend(scores_XBMW: Tensor, sinks_BM: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return each row's weights before division by their sum, and the sums (without dimensions X and W)."""
    largest_BM = scores_XBMW.amax(dim=(0, -1))
    weights_XBMW = (scores_XBMW - largest_BM.unsqueeze(-1)).exp_()
    sums_BM = _sum_in_order(weights_XBMW.sum(dim=-1))
    return weights_XBMW, sums_BM if sinks_BM is None else sums_BM + (sinks_BM - largest_BM).exp()


def _capped(scores: Tensor, soft_cap: float | None) -> Tensor:
    """Replace scores in place by `soft_cap * tanh(score / soft_cap)`."""
    return scores if soft_cap is None else scores.div_(soft_cap).tanh_().mul_(soft_cap)


def _sum_in_order(x_X: Tensor) -> Tensor:
    """Sum over the first dimension in order. Zeros at either end change nothing."""
    total = x_X[0].clone()
    for index in range(1, x_X.shape[0]):
        total += x_X[index]
    return total


@dataclass(frozen=True, slots=True, eq=False)
class _Decode:
    row: int
    context_len: int
    first_tile: int
    slots_W: Tensor

    @property
    def num_tiles(self) -> int:
        return self.slots_W.shape[0] // KV_TILE


def _grouped(decodes: list[_Decode], heads: _Heads) -> Iterator[list[_Decode]]:
    """Batch decodes with similar numbers of keys, as long as the keys of the batch stay small."""
    group: list[_Decode] = []
    for decode in sorted(decodes, key=lambda decode: decode.num_tiles):
        numbers = (len(group) + 1) * decode.num_tiles * KV_TILE * heads.num_kv_heads * heads.head_dim
        if group and (numbers > _MAX_KEY_NUMBERS or decode.num_tiles > group[0].num_tiles * 5 // 4):
            yield group
            group = []
        group.append(decode)
    if group:
        yield group


@dataclass(frozen=True, slots=True, eq=False)
class _Decodes:
    """One token each of R requests."""

    heads: _Heads
    rows_R: Tensor
    slots_XRW: Tensor
    hidden_X1R1W: Tensor
    """True if a key is masked."""
    distances_X1R1W: Tensor
    """Position of the key minus that of the query; never positive for a visible key."""

    def run(
        self, q_TNH: Tensor, k_cache_PSKH: Tensor, v_cache_PSKH: Tensor, out_TNV: Tensor, sinks_N: Tensor | None
    ) -> None:
        heads, (num_tiles, num_requests, _) = self.heads, self.slots_XRW.shape
        group = slice(0, heads.group)
        q_KRMH = q_TNH.new_zeros(heads.num_kv_heads, num_requests, heads.rows, heads.head_dim, dtype=torch.float32)
        q_KRMH[:, :, group] = q_TNH[self.rows_R].unflatten(1, (heads.num_kv_heads, -1)).transpose(0, 1)
        q_KRMH.mul_(heads.scale)
        k_XRWKH = _gather(k_cache_PSKH, self.slots_XRW)
        scores_XKRMW = q_KRMH.new_empty(num_tiles, *q_KRMH.shape[:3], KV_TILE)
        for tile in range(num_tiles):
            for head in range(heads.num_kv_heads):
                torch.bmm(q_KRMH[head], k_XRWKH[tile, :, :, head].transpose(1, 2), out=scores_XKRMW[tile, head])
        visible_XKRGW = _capped(scores_XKRMW, heads.soft_cap)[..., group, :]
        if heads.slopes_KG1 is not None:
            visible_XKRGW += heads.slopes_KG1.unsqueeze(1) * self.distances_X1R1W
        visible_XKRGW.masked_fill_(self.hidden_X1R1W, float("-inf"))
        sinks_K1G = None if sinks_N is None else sinks_N.float().view(heads.num_kv_heads, 1, -1)
        weights_XKRGW, sums_KRG = _attend(visible_XKRGW, sinks_K1G)
        weights_XKRMW = scores_XKRMW.zero_()
        weights_XKRMW[..., group, :] = weights_XKRGW
        v_XRWKV = _gather(v_cache_PSKH, self.slots_XRW)
        out_XKRMV = q_KRMH.new_empty(num_tiles, *q_KRMH.shape[:3], heads.value_dim)
        for tile in range(num_tiles):
            for head in range(heads.num_kv_heads):
                torch.bmm(weights_XKRMW[tile, head], v_XRWKV[tile, :, :, head], out=out_XKRMV[tile, head])
        out_KRGV = _sum_in_order(out_XKRMV[..., group, :]) / sums_KRG.unsqueeze(-1)
        out_TNV[self.rows_R] = out_KRGV.transpose(0, 1).flatten(1, 2).to(out_TNV.dtype)


def _plan_decodes(heads: _Heads, shape: AttentionShape, decodes: list[_Decode]) -> _Decodes:
    num_tiles = max(decode.num_tiles for decode in decodes)
    positions_XW = torch.arange(num_tiles * KV_TILE).view(num_tiles, KV_TILE)
    slots, hidden, distances = [], [], []
    for decode in decodes:
        padding = decode.slots_W[-1:].expand(num_tiles * KV_TILE - decode.slots_W.shape[0])
        slots.append(torch.cat((decode.slots_W, padding)).view(num_tiles, KV_TILE))
        positions = positions_XW + decode.first_tile * KV_TILE
        unseen = positions >= decode.context_len
        unseen |= positions < shape.first_key(decode.context_len - 1)
        hidden.append(unseen)
        distances.append(positions - (decode.context_len - 1))
    return _Decodes(
        heads,
        torch.tensor([decode.row for decode in decodes]),
        torch.stack(slots, dim=1),
        torch.stack(hidden, dim=1)[:, None, :, None],
        torch.stack(distances, dim=1)[:, None, :, None],
    )


@dataclass(frozen=True, slots=True, eq=False)
class _TileGroup:
    """Tiles of query rows [first, end) of a chunk, and the tiles of keys [first_key, end_key) that they may see."""

    first: int
    end: int
    first_key: int
    end_key: int
    masks: dict[int, Tensor]
    """Masks of the partly visible tiles of keys, shape Y, tokens, 1, W: True if a key is masked."""
    positions_YL: Tensor
    """Positions of the queries, counted from the first tile of keys of the chunk."""


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """Several adjacent tokens of one request."""

    heads: _Heads
    start: int
    end: int
    slots_W: Tensor
    groups: list[_TileGroup]

    def run(
        self, q_TNH: Tensor, k_cache_PSKH: Tensor, v_cache_PSKH: Tensor, out_TNV: Tensor, sinks_N: Tensor | None
    ) -> None:
        heads, tokens = self.heads, self.heads.tokens_per_tile
        num_tokens, num_tiles = self.end - self.start, self.groups[-1].end
        q_LNH = q_TNH.new_zeros(num_tiles * tokens, heads.num_heads, heads.head_dim, dtype=torch.float32)
        q_LNH[:num_tokens] = q_TNH[self.start : self.end]
        q_KYLGH = q_LNH.mul_(heads.scale).view(num_tiles, tokens, heads.num_kv_heads, -1, heads.head_dim)
        q_KYLGH = q_KYLGH.permute(2, 0, 1, 3, 4)
        q_KYMH = q_LNH.new_zeros(heads.num_kv_heads, num_tiles, heads.rows, heads.head_dim)
        q_KYMH[:, :, : tokens * heads.group] = q_KYLGH.flatten(2, 3)
        slots_XW = self.slots_W.view(-1, KV_TILE)
        k_XWKH, v_XWKV = _gather(k_cache_PSKH, slots_XW), _gather(v_cache_PSKH, slots_XW)
        out_KYMV = q_KYMH.new_empty(*q_KYMH.shape[:3], heads.value_dim)
        for group in self.groups:
            out_KYMV[:, group.first : group.end] = self._attend_group(group, q_KYMH, k_XWKH, v_XWKV, sinks_N)
        out_KYLGV = out_KYMV[:, :, : tokens * heads.group].unflatten(2, (tokens, heads.group))
        out_LNV = out_KYLGV.permute(1, 2, 0, 3, 4).reshape(-1, heads.num_heads, heads.value_dim)
        out_TNV[self.start : self.end] = out_LNV[:num_tokens].to(out_TNV.dtype)

    def _attend_group(
        self, group: _TileGroup, q_KYMH: Tensor, k_XWKH: Tensor, v_XWKV: Tensor, sinks_N: Tensor | None
    ) -> Tensor:
        heads, num_tiles = self.heads, group.end - group.first
        tiles, keys = slice(group.first, group.end), range(group.first_key, group.end_key)
        scores_XKYMW = q_KYMH.new_empty(len(keys), heads.num_kv_heads, num_tiles, heads.rows, KV_TILE)
        for index, key in enumerate(keys):
            for head in range(heads.num_kv_heads):
                k_YHW = k_XWKH[key, :, head].t().expand(num_tiles, -1, -1)
                torch.bmm(q_KYMH[head, tiles], k_YHW, out=scores_XKYMW[index, head])
            _capped(scores_XKYMW[index], heads.soft_cap)
            visible = scores_XKYMW[index, :, :, : heads.tokens_per_tile * heads.group]
            visible_KYLGW = visible.unflatten(2, (heads.tokens_per_tile, heads.group))
            if heads.slopes_KG1 is not None:
                distances_YLW = torch.arange(key * KV_TILE, (key + 1) * KV_TILE) - group.positions_YL.unsqueeze(-1)
                visible_KYLGW += heads.slopes_KG1[:, None, None] * distances_YLW.unsqueeze(2)
            if key in group.masks:
                visible_KYLGW.masked_fill_(group.masks[key], float("-inf"))
        weights_XKYMW, sums_KYM = _attend(scores_XKYMW, None if sinks_N is None else self._sinks(sinks_N))
        out_XKYMV = q_KYMH.new_empty(*weights_XKYMW.shape[:4], heads.value_dim)
        for index, key in enumerate(keys):
            for head in range(heads.num_kv_heads):
                v_YWV = v_XWKV[key, :, head].expand(num_tiles, -1, -1)
                torch.bmm(weights_XKYMW[index, head], v_YWV, out=out_XKYMV[index, head])
        return _sum_in_order(out_XKYMV) / sums_KYM.unsqueeze(-1)

    def _sinks(self, sinks_N: Tensor) -> Tensor:
        """Return the sink of each row of a tile, K1M; padding rows have an arbitrary head's sink."""
        heads = self.heads
        sinks_KG = sinks_N.float().view(heads.num_kv_heads, -1)
        return sinks_KG[:, torch.arange(heads.rows) % heads.group].unsqueeze(1)


def _plan_chunk(
    heads: _Heads,
    shape: AttentionShape,
    rows: tuple[int, int],
    first_position: int,
    first_tile: int,
    slots_W: Tensor,
    *,
    is_span: bool,
) -> _Chunk:
    start, end = rows
    tokens = heads.tokens_per_tile
    num_tiles = -(-(end - start) // tokens)
    last_position = first_position + end - start - 1
    # Padding tokens repeat the last token, because they must see some key; their rows are dropped.
    positions_YL = (first_position + torch.arange(num_tiles * tokens)).clamp_(max=last_position).view(num_tiles, tokens)
    scores_per_tile = heads.num_kv_heads * heads.rows * slots_W.shape[0]
    step = max(1, _MAX_SCORES // scores_per_tile)
    groups = []
    for first in range(0, num_tiles, step):
        members_YL = positions_YL[first : first + step]
        lowest, highest = int(members_YL[0, 0]), int(members_YL[-1, -1])
        masks = {}
        first_key = shape.first_key(lowest) // KV_TILE
        end_key = (shape.end_key(highest, last_position + 1, is_span=is_span) - 1) // KV_TILE + 1
        for key in range(first_key, end_key):
            key_positions_W = torch.arange(key * KV_TILE, (key + 1) * KV_TILE)
            hidden_YLW = _hidden(shape, members_YL.unsqueeze(-1), key_positions_W, last_position + 1, is_span=is_span)
            if bool(hidden_YLW.any()):
                masks[key - first_tile] = hidden_YLW.unsqueeze(2)
        keys = first_key - first_tile, end_key - first_tile
        positions = members_YL - first_tile * KV_TILE
        groups.append(_TileGroup(first, first + len(members_YL), *keys, masks, positions))
    return _Chunk(heads, start, end, slots_W, groups)


def _hidden(shape: AttentionShape, positions_YL1: Tensor, keys_W: Tensor, context_len: int, *, is_span: bool) -> Tensor:
    """Return YLW, true if a key is not visible from a position."""
    window = shape.window
    if not shape.is_causal:
        hidden_YLW = (keys_W >= context_len).expand(*positions_YL1.shape[:2], -1)
        return hidden_YLW if window is None else hidden_YLW | ((keys_W - positions_YL1).abs() > window // 2)
    hidden_YLW = (keys_W >= context_len).expand(*positions_YL1.shape[:2], -1) if is_span else keys_W > positions_YL1
    if window is not None:
        starts_YL1 = positions_YL1 // window * window if shape.is_chunked else positions_YL1 - window + 1
        hidden_YLW = hidden_YLW | (keys_W < starts_YL1)
    return hidden_YLW
