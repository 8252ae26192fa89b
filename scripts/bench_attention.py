"""Cost of paged attention per layer: the native operations and the torch path.

Decodes read the caches of so many layers that they do not fit into the processor's cache, from blocks in random order.
The bytes are keys and values, each counted once; the operations are the two products of causal attention.
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels import paged_attention
from octavo.kernels.native import direct, library
from octavo.kernels.native.arguments import (
    Arguments,
    GroupArguments,
    Matrix,
    OperationEntry,
    ProgramArguments,
    StepArguments,
)
from octavo.kernels.native.memory import allocate
from octavo.kernels.paged_attention import AttentionShape
from octavo.kernels.paged_attention.layout import CacheLayout, LayoutArguments
from octavo.kernels.paged_attention.native import (
    PagedAttentionArguments,
    PlanAttentionArguments,
    ShapeArguments,
    workspace_bytes,
)
from octavo.kernels.store_kv.native import StoreKvArguments

COLD_BYTES = 192 << 20
"""Caches of all measured layers together: several times a processor's last-level cache."""
DECODES = [(batch, context) for batch in (1, 8, 32) for context in (512, 2048, 8192)]
SHARED_KEYS = 512
SHARED_DECODES = [(batch, SHARED_KEYS + 28) for batch in (8, 32, 64)]
"""Batches of requests that share their first 512 keys."""
PREFILLS = [512, 2048, 8192]


class NativeLayers:
    """Some layers' attention for one step, as one program."""

    def __init__(self, shape: AttentionShape, dtype: torch.dtype, batch: "Batch", num_layers: int, num_threads: int):
        native = library.load()
        layout = CacheLayout.of(shape, dtype, batch.block_size)
        mirrored = ShapeArguments.of(shape, layout)
        rows, width = batch.num_rows, shape.num_heads * shape.head_dim
        num_bytes = workspace_bytes(native, mirrored, rows, max(batch.context_lens), num_threads)
        workspace = allocate(num_bytes)
        self.q, self.out = torch.randn(rows, width), torch.empty(rows, shape.num_heads * shape.value_dim)
        caches = [layout.allocate(batch.num_blocks) for _ in range(num_layers)]
        for cache in caches:
            _fill(native, layout, cache, batch.num_blocks)
        plan = PlanAttentionArguments(mirrored, workspace.data_ptr(), num_bytes, max(batch.context_lens))
        q, out, address = Matrix.of(self.q), Matrix.of(self.out), workspace.data_ptr()
        layers = [
            PagedAttentionArguments(q, out, k.data_ptr(), v.data_ptr(), mirrored, address, None, 1.0, 1.0)
            for k, v in caches
        ]
        entries = [
            _entry(native, "plan_attention", plan),
            *(_entry(native, "paged_attention", layer) for layer in layers),
        ]
        self._table = (OperationEntry * len(entries))(*entries)
        self._counters = (ctypes.c_int64 * len(entries))()
        self._program = ProgramArguments(self._table, len(entries), ctypes.addressof(self._counters), None)
        self._step = batch.step()
        self._run = native.function("run", [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64])
        self._num_threads = num_threads
        self._alive = plan, layers, caches, workspace, batch

    def run(self) -> None:
        """Attend in all layers."""
        self._run(ctypes.addressof(self._program), ctypes.addressof(self._step), self._num_threads)


class Batch:
    """Requests of equal length whose blocks lie in random order, those of the first `shared` keys the same for all."""

    def __init__(self, num_requests: int, rows: int, context_len: int, block_size: int, shared: int = 0) -> None:
        self.block_size = block_size
        self.num_rows = num_requests * rows
        self.query_starts = list(range(0, self.num_rows + 1, rows))
        self.context_lens = [context_len] * num_requests
        common = shared // block_size
        own = -(-context_len // block_size) - common
        self.num_blocks = common + num_requests * own
        order = torch.randperm(self.num_blocks).int()
        self.block_table_RP = torch.cat(
            [order[:common].expand(num_requests, -1), order[common:].view(num_requests, own)], dim=1
        ).contiguous()
        self._starts, self._lens = torch.tensor(self.query_starts), torch.tensor(self.context_lens)

    def step(self) -> StepArguments:
        """Mirror the batch, which must outlive it."""
        return StepArguments(
            num_rows=self.num_rows,
            num_requests=len(self.context_lens),
            query_starts=self._starts.data_ptr(),
            context_lens=self._lens.data_ptr(),
            groups=ctypes.pointer(
                GroupArguments(
                    block_table=self.block_table_RP.data_ptr(), block_table_width=self.block_table_RP.stride(0)
                )
            ),
        )


def main() -> None:
    """Print one line for each batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    heads = "query heads, key heads, head dimension (SmolLM2-135M's), and how much of a key is its value, if it is one"
    parser.add_argument("--heads", default="9,3,64", help=heads)
    parser.add_argument(
        "--dtype", default="bfloat16", help="of the cache: bfloat16, float32, float16, int8, float8_e4m3fn"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-torch", action="store_true", help="skip the torch path")
    parser.add_argument("--only", choices=["decode", "shared", "prefill"])
    options = parser.parse_args()
    num_heads, num_kv_heads, head_dim, *value_dim = map(int, options.heads.split(","))
    key_value_dim = value_dim[0] if value_dim else None
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, head_dim**-0.5, key_value_dim=key_value_dim)
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    print(f"{shape}, cache {options.dtype}, {options.threads} threads; best and median of {options.rounds} rounds")
    print(f"{'batch':>18} {'ms/layer':>9} {'median':>9} {'GB/s':>7} {'GFLOP/s':>8} {'torch ms':>9} {'ratio':>6}")
    batches = [(num, 1, context, 0) for num, context in DECODES] if options.only in (None, "decode") else []
    if options.only in (None, "shared"):
        batches += [(num, 1, context, SHARED_KEYS) for num, context in SHARED_DECODES]
    batches += [(1, rows, rows, 0) for rows in PREFILLS] if options.only in (None, "prefill") else []
    for num_requests, rows, context_len, shared in batches:
        measure(shape, options, num_requests, rows, context_len, shared)


def measure(
    shape: AttentionShape, options: argparse.Namespace, num_requests: int, rows: int, context_len: int, shared: int
) -> None:
    """Print the line of one batch."""
    dtype = getattr(torch, options.dtype)
    batch = Batch(num_requests, rows, context_len, options.block_size, shared)
    slot_bytes = CacheLayout.of(shape, dtype, 16).block_bytes // 16
    cache_bytes = slot_bytes * (num_requests * (context_len - shared) + shared)
    num_layers = max(1, min(30, COLD_BYTES // cache_bytes)) if rows == 1 else 1
    layers = NativeLayers(shape, dtype, batch, num_layers, options.threads)
    times = [seconds / num_layers for seconds in timed(layers.run, options.rounds)]
    pairs = num_requests * (rows * context_len - rows * (rows - 1) // 2)
    flops = 2 * pairs * shape.num_heads * (shape.head_dim + shape.value_dim)
    best = min(times)
    name = f"{num_requests} x {context_len}" if rows == 1 else f"prefill {rows}"
    name += ", shared" if shared else ""
    line = f"{name:>18} {best * 1e3:9.3f} {statistics.median(times) * 1e3:9.3f}"
    line += f" {cache_bytes / best / 1e9:7.1f} {flops / best / 1e9:8.0f}"
    if not options.no_torch and dtype != torch.int8:
        eager = min(timed(torch_path(shape, batch, dtype), 2))
        line += f" {eager * 1e3:9.2f} {eager / best:6.1f}"
    print(line, flush=True)


def torch_path(shape: AttentionShape, batch: Batch, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return one layer of the path without a compiler."""
    paged = (batch.num_blocks, batch.block_size, shape.num_kv_heads, shape.head_dim)
    k = torch.randn(paged).to(dtype)
    v = torch.randn(paged).to(dtype) if shape.key_value_dim is None else k[..., : shape.key_value_dim]
    q = torch.randn(batch.num_rows, shape.num_heads, shape.head_dim).to(dtype)
    starts, lens = batch.query_starts, batch.context_lens
    planned = paged_attention.plan(starts, lens, batch.block_table_RP, batch.block_size, shape)
    return lambda: planned(q, k, v)


def timed(function: Callable[[], object], rounds: int) -> list[float]:
    """Return the seconds of some calls, without the first."""
    function()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return times


def _fill(native: library.NativeLibrary, layout: CacheLayout, cache: tuple[Tensor, Tensor], num_blocks: int) -> None:
    num_slots = num_blocks * layout.block_size
    for first in range(0, num_slots, 4096):
        slots = torch.arange(first, min(first + 4096, num_slots))
        rows = torch.randn(len(slots), layout.num_kv_heads * layout.head_dim)
        k, v = (buffer.data_ptr() for buffer in cache)
        arguments = StoreKvArguments(Matrix.of(rows), Matrix.of(rows), k, v, LayoutArguments.of(layout), 1.0, 1.0)
        step = StepArguments(num_rows=len(slots), groups=ctypes.pointer(GroupArguments(slots=slots.data_ptr())))
        direct.run(native, "store_kv", arguments, step=step)


def _entry(native: library.NativeLibrary, name: str, arguments: Arguments) -> OperationEntry:
    return OperationEntry(native.operation(name, type(arguments)), ctypes.addressof(arguments), 1)


if __name__ == "__main__":
    main()
