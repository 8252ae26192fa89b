"""The GPU's ceilings, and attention alone: octavo's kernel, torch's SDPA and FlexAttention, on equal numbers."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench_gpu_parts.machine import AttentionCase, KernelName
from bench_gpu_parts.timing import DEVICE, captured, normal, num_copies, release_memory, seconds_of
from octavo.kernels.paged_attention import AttentionShape, gpu
from octavo.worker_proc.cache.storage import KVStorage

COPY_BYTES = 4 << 30
MATRIX_SIZE = 8192
BLOCK_SIZE = 16

_BF16 = torch.bfloat16


def ceilings(copy_bytes: int = COPY_BYTES, matrix_size: int = MATRIX_SIZE) -> dict[str, float]:
    """Return the rates of a large copy and of a large product of random matrices."""
    rates = {"copy_bytes": _copy_rate(copy_bytes), "matrix_flops": _matrix_rate(matrix_size)}
    release_memory()
    return rates


def _copy_rate(num_bytes: int) -> float:
    source = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source))


def _matrix_rate(size: int) -> float:
    left, right = (normal(size, size) for _ in range(2))
    product = torch.empty_like(left)
    return 2 * size**3 / seconds_of(lambda: torch.mm(left, right, out=product))


@torch.inference_mode()
def attention(kernel: KernelName, case: AttentionCase) -> float:
    """Return the seconds of one layer's attention.

    Raises:
        RuntimeError: the kernel does not compute this case.
    """
    layer_bytes = 2 * case.batch * case.context * case.num_kv_heads * case.head_dim * _BF16.itemsize
    num_layers = num_copies(layer_bytes)
    make = {"octavo": _octavo, "sdpa": _sdpa, "flex": _flex}[kernel]
    attend = make(case, num_layers)
    try:
        return seconds_of(captured(attend, num_layers)) / num_layers
    finally:
        del attend
        release_memory()


def _octavo(case: AttentionCase, num_layers: int) -> Callable[[int], Tensor]:
    blocks_each = -(-case.context // BLOCK_SIZE)
    storage = KVStorage(
        num_layers=num_layers,
        num_blocks=case.batch * blocks_each,
        block_size=BLOCK_SIZE,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        dtype=_BF16,
        device=DEVICE,
        key_value_dim=case.key_value_dim,
    )
    for layer in range(num_layers):
        for cache in storage.layer(layer):
            cache.normal_()
    order = torch.randperm(case.batch * blocks_each, device=DEVICE)
    block_table = order.view(case.batch, blocks_each).int()
    shared_blocks = case.num_shared // BLOCK_SIZE
    block_table[:, :shared_blocks] = block_table[0, :shared_blocks].clone()
    planned = gpu.plan(
        [row * case.num_tokens for row in range(case.batch + 1)],
        [case.context] * case.batch,
        block_table,
        BLOCK_SIZE,
        AttentionShape(
            case.num_heads, case.num_kv_heads, case.head_dim, case.head_dim**-0.5, key_value_dim=case.key_value_dim
        ),
    )
    queries = normal(case.batch * case.num_tokens, case.num_heads, case.head_dim)
    return lambda layer: planned(queries, *storage.layer(layer))


def _sdpa(case: AttentionCase, num_layers: int) -> Callable[[int], Tensor]:
    """Return the faster of torch's two kernels; keys and values are contiguous, not paged."""
    queries, kv = _dense(case, num_layers)

    def attend(backend: SDPBackend) -> Callable[[int], Tensor]:
        def run(layer: int) -> Tensor:
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(
                    queries, *kv[layer], is_causal=case.num_tokens > 1, enable_gqa=True
                )

        return run

    found: dict[float, Callable[[int], Tensor]] = {}
    rejections = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        run = attend(backend)
        try:
            found[seconds_of(partial(run, 0))] = run
        except RuntimeError as error:
            rejections.append(str(error))
    if not found:
        raise RuntimeError("; ".join(rejections))
    return found[min(found)]


def _flex(case: AttentionCase, num_layers: int) -> Callable[[int], Tensor]:
    queries, kv = _dense(case, num_layers)
    mask = None
    if case.num_tokens > 1:
        mask = create_block_mask(
            lambda batch, head, query, key: query >= key, None, None, case.num_tokens, case.context, device=DEVICE
        )
    compiled = torch.compile(flex_attention)

    def attend(layer: int) -> Tensor:
        out: Tensor = compiled(queries, *kv[layer], block_mask=mask, enable_gqa=True)
        return out

    attend(0)
    return attend


def _dense(case: AttentionCase, num_layers: int) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    shape = (case.batch, case.num_kv_heads, case.context, case.head_dim)
    queries = normal(case.batch, case.num_heads, case.num_tokens, case.head_dim)
    return queries, [(normal(*shape), normal(*shape)) for _ in range(num_layers)]
