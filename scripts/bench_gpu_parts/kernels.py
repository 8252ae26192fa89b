"""What the GPU can do at best, and attention alone: octavo's kernel, torch's SDPA and FlexAttention, on equal numbers.

Times are of CUDA graphs, so that no launch from Python is among them. Keys and values are larger than the GPU's cache:
a call has as many layers as that takes.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench_gpu_parts.machine import AttentionCase, KernelName
from octavo.kernels import paged_attention
from octavo.worker_proc.cache.storage import KVStorage

COPY_BYTES = 4 << 30
MATRIX_SIZE = 8192
BLOCK_SIZE = 16
CACHE_BYTES = 256 << 20
"""Several times the second-level cache of any GPU."""
MAX_LAYERS = 64
WARM_UPS = 3
LEAST_S = 0.2
"""Of a measurement."""

_BF16 = torch.bfloat16


def ceilings() -> dict[str, float]:
    """Return the rates of a large copy and of a large product of random matrices."""
    rates = {"copy_bytes": _copy_rate(), "matrix_flops": _matrix_rate()}
    torch.cuda.empty_cache()
    return rates


def _copy_rate() -> float:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds_of(lambda: target.copy_(source))


def _matrix_rate() -> float:
    left, right = (_normal(MATRIX_SIZE, MATRIX_SIZE) for _ in range(2))
    product = torch.empty_like(left)
    return 2 * MATRIX_SIZE**3 / seconds_of(lambda: torch.mm(left, right, out=product))


@torch.inference_mode()
def attention(kernel: KernelName, case: AttentionCase) -> float:
    """Return the seconds of one layer's attention.

    Raises:
        RuntimeError: the kernel does not compute this case.
    """
    layer_bytes = 2 * case.batch * case.context * case.num_kv_heads * case.head_dim * _BF16.itemsize
    num_layers = min(-(-CACHE_BYTES // layer_bytes), MAX_LAYERS)
    make = {"octavo": _octavo, "sdpa": _sdpa, "flex": _flex}[kernel]
    attend = make(case, num_layers)
    try:
        return seconds_of(_captured(attend, num_layers)) / num_layers
    finally:
        del attend
        torch.cuda.empty_cache()


def seconds_of(work: Callable[[], object]) -> float:
    """Return the GPU's seconds for one call, as the mean of as many as `LEAST_S` takes."""
    for _ in range(WARM_UPS):
        work()
    once_s = _elapsed(work, 1)
    num_calls = max(3, min(1000, round(LEAST_S / once_s)))
    return _elapsed(work, num_calls) / num_calls


def _elapsed(work: Callable[[], object], num_calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(num_calls):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _captured(attend: Callable[[int], Tensor], num_layers: int) -> Callable[[], None]:
    """Return a graph's replay of the attention of all layers."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend(0)  # compiles, and takes what memory it needs once
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(num_layers):
            attend(layer)
    replay: Callable[[], None] = graph.replay
    return replay


def _octavo(case: AttentionCase, num_layers: int) -> Callable[[int], Tensor]:
    blocks_each = -(-case.context // BLOCK_SIZE)
    storage = KVStorage(
        num_layers=num_layers,
        num_blocks=case.batch * blocks_each,
        block_size=BLOCK_SIZE,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        dtype=_BF16,
        device="cuda",
    )
    for layer in range(num_layers):
        for cache in storage.layer(layer):
            cache.normal_()
    order = torch.randperm(case.batch * blocks_each, device="cuda")
    planned = paged_attention.plan(
        [row * case.num_tokens for row in range(case.batch + 1)],
        [case.context] * case.batch,
        order.view(case.batch, blocks_each).int(),
        BLOCK_SIZE,
        paged_attention.AttentionShape(case.num_heads, case.num_kv_heads, case.head_dim, case.head_dim**-0.5),
    )
    queries = _normal(case.batch * case.num_tokens, case.num_heads, case.head_dim)
    return lambda layer: planned(queries, *storage.layer(layer))


def _sdpa(case: AttentionCase, num_layers: int) -> Callable[[int], Tensor]:
    """Return the faster of torch's two; whole keys and values, not paged ones."""
    queries, kv = _dense(case, num_layers)

    def attend(backend: SDPBackend) -> Callable[[int], Tensor]:
        def run(layer: int) -> Tensor:
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(
                    queries, *kv[layer], is_causal=case.num_tokens > 1, enable_gqa=True
                )

        return run

    found: dict[float, Callable[[int], Tensor]] = {}
    refusals = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        run = attend(backend)
        try:
            found[seconds_of(lambda run=run: run(0))] = run  # type: ignore[misc]
        except RuntimeError as error:
            refusals.append(str(error))
    if not found:
        raise RuntimeError("; ".join(refusals))
    return found[min(found)]


def _flex(case: AttentionCase, num_layers: int) -> Callable[[int], Tensor]:
    queries, kv = _dense(case, num_layers)
    mask = None
    if case.num_tokens > 1:
        mask = create_block_mask(
            lambda batch, head, query, key: query >= key, None, None, case.num_tokens, case.context, device="cuda"
        )
    compiled = torch.compile(flex_attention)

    def attend(layer: int) -> Tensor:
        out: Tensor = compiled(queries, *kv[layer], block_mask=mask, enable_gqa=True)
        return out

    attend(0)
    return attend


def _dense(case: AttentionCase, num_layers: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    shape = (case.batch, case.num_kv_heads, case.context, case.head_dim)
    queries = _normal(case.batch, case.num_heads, case.num_tokens, case.head_dim)
    return queries, [(_normal(*shape), _normal(*shape)) for _ in range(num_layers)]


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=_BF16, device="cuda")
