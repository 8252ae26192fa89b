"""Latent attention on a GPU: `paged_attention` over keys that begin with their values, and what makes them."""

import numpy as np
import pytest
import torch
from gpu_attention import attend, check, family, step_of
from kernel_checks import assert_close, random
from paged_requests import Paged, paged
from torch import Tensor
from triton_interpreter import IS_INTERPRETING

from octavo.kernels.dispatch import ShapeError
from octavo.kernels.head_linear import cases as head_cases
from octavo.kernels.head_linear import gpu as head_gpu
from octavo.kernels.head_linear import reference as head_reference
from octavo.kernels.latent_heads import cases as latent_cases
from octavo.kernels.latent_heads import gpu as latent_gpu
from octavo.kernels.latent_heads import reference as latent_reference
from octavo.kernels.linear import PackedLinear
from octavo.kernels.linear.gpu import Packer
from octavo.kernels.paged_attention import AttentionShape, cases, gpu, gpu_tiling
from octavo.kernels.store_kv import gpu as store_gpu

BF16, F32 = torch.bfloat16, torch.float32
SHAPES = {
    "DeepSeek-V2-Lite": AttentionShape(16, 1, 576, 0.1, key_value_dim=512),
    "DeepSeek-V3": AttentionShape(128, 1, 576, 0.1, key_value_dim=512),
    "odd parts": AttentionShape(5, 1, 26, 0.2, key_value_dim=19),
    "heads in two groups": AttentionShape(40, 1, 40, 0.2, key_value_dim=32),
    "a window": AttentionShape(4, 1, 24, 0.3, window=90, key_value_dim=16),
    "all at once": AttentionShape(
        4, 1, 24, 0.2, window=100, soft_cap=8.0, slopes=(0.5, 0.2, 0.1, 0.06), key_value_dim=16
    ),
}
CASES = [
    ("DeepSeek-V2-Lite", BF16),
    ("DeepSeek-V3", BF16),
    ("odd parts", F32),
    ("heads in two groups", torch.float16),
    ("a window", BF16),
    ("all at once", F32),
]
SMALL = AttentionShape(4, 1, 24, 0.2, key_value_dim=16)


@pytest.mark.parametrize(("name", "dtype"), CASES if not IS_INTERPRETING else [CASES[0], *CASES[2:]], ids=str)
def test_latent_attention(device: torch.device, seed: int, name: str, dtype: torch.dtype) -> None:
    """Decodes, alone and in several programs, a request in one segment, and prompts."""
    shape = SHAPES[name]
    block_size = 5 if dtype == F32 else 16
    data = paged([300, 70], block_size, shape, dtype, seed)
    parts = [(0, 1, 300), (1, 2, 70), (0, 5, 270)]
    check(device, data, parts, block_size, shape, cases.TOLERANCES[dtype])


@pytest.mark.parametrize("block_size", [16] if IS_INTERPRETING else [5, 16, 64, 256])
def test_a_position_has_the_same_bits_in_every_step(device: torch.device, seed: int, block_size: int) -> None:
    """As a row of a prompt, of any chunk of it, and as a decode, alone or beside others, in one program or in many."""
    length = 280 if IS_INTERPRETING else 3000
    data = paged([length, 40], block_size, SMALL, BF16, seed)
    whole = attend(device, data, [(0, length, length)], block_size, SMALL)[0]
    chunks = [(1, length), (1, 256), (1, 257), (7, 260), (9, 100)]
    if not IS_INTERPRETING:
        chunks += [(1, keys) for keys in range(1, length, 7)] + [(900, 2000), (64, 2100)]
    parts = [(0, rows, keys) for rows, keys in chunks]
    beside = attend(device, data, [(1, 1, 40), *parts], block_size, SMALL)[1:]
    for (_, rows, keys), actual in zip(parts, beside, strict=True):
        assert torch.equal(actual, whole[keys - rows : keys]), (rows, keys)
    for part in parts[:1]:
        assert torch.equal(attend(device, data, [part], block_size, SMALL)[0], whole[part[2] - part[1] : part[2]]), part


def test_any_number_of_programs_gives_the_same_bits(
    device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With less memory for totals than there are tiles, and with tiles of fewer heads."""
    data = paged([290, 40], 16, SMALL, BF16, seed)
    parts = [(0, 1, 290), (0, 5, 270), (1, 9, 40)]
    expected = attend(device, data, parts, 16, SMALL)
    for num_programs in (1, 100):
        monkeypatch.setattr(gpu, "_num_processors", lambda _, number=num_programs: number)
        for actual, rows in zip(attend(device, data, parts, 16, SMALL), expected, strict=True):
            assert torch.equal(actual, rows), num_programs
    if not IS_INTERPRETING:  # a GPU has one size of tiles
        return
    monkeypatch.setattr(gpu_tiling, "latent_rows", lambda: 2)
    for actual, rows in zip(attend(device, data, parts, 16, SMALL), expected, strict=True):
        assert torch.equal(actual, rows)


def test_requests_that_share_keys_have_the_bits_of_each_alone(device: torch.device, seed: int) -> None:
    own = [40, 270, 1]
    data = family(3, 512, own, SMALL, BF16, seed)
    parts = [(member, 1, 512 + own[member]) for member in range(3)]
    step, _, _ = step_of(device, data, parts, 16, SMALL)
    assert int(step.words_W[step.layout.num_items]) > 0
    for part, actual in zip(parts, attend(device, data, parts, 16, SMALL), strict=True):
        assert torch.equal(attend(device, data, [part], 16, SMALL)[0], actual), part


def test_requests_beyond_the_limits_are_not_divided_and_have_the_same_bits(device: torch.device, seed: int) -> None:
    data = paged([600, 290], 16, SMALL, F32, seed)
    expected = torch.cat(attend(device, data, [(0, 1, 600), (1, 1, 290)], 16, SMALL))
    queries = torch.stack([data.queries[0][-1], data.queries[1][-1]]).to(device)
    step = gpu.StepAttention(SMALL, 16, gpu.Limits(2, 2, 0), data.block_table.to(device))
    words = np.empty(step.layout.num_words, dtype=np.int32)
    step.write_plan(words, [0, 1, 2], [600, 290])
    step.words_W.copy_(torch.from_numpy(words))
    assert torch.equal(step(queries, data.k_cache.to(device), data.v_cache.to(device)).cpu(), expected)


def test_a_cache_of_8_bits(device: torch.device, seed: int) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("this GPU has no float8_e4m3fn")
    data = paged([270, 70], 16, SMALL, BF16, seed)
    k_cache = (data.k_cache * 4).to(torch.float8_e4m3fn)
    data = Paged(k_cache, k_cache[..., :16], data.block_table, data.queries)
    scales = {"k_scale": 0.25, "v_scale": 0.25}
    check(device, data, [(0, 1, 270), (1, 40, 70)], 16, SMALL, cases.TOLERANCES[BF16], **scales)
    step, queries, _ = step_of(device, data, [(0, 1, 270)], 16, SMALL)
    with pytest.raises(ShapeError, match="have their scale"):
        step(queries, data.k_cache.to(device), data.v_cache.to(device), k_scale=0.25)


@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(4, 2, 24, 1.0, key_value_dim=16),
        AttentionShape(4, 1, 704, 1.0, key_value_dim=640),
        AttentionShape(4, 1, 640, 1.0, key_value_dim=512),
        AttentionShape(4, 1, 64, 1.0, key_value_dim=64),
    ],
    ids=str,
)
def test_it_refuses_what_it_has_no_tiles_for(device: torch.device, shape: AttentionShape) -> None:
    with pytest.raises(ShapeError, match="no tiles for"):
        gpu.plan([0, 1], [1], torch.zeros(1, 1, dtype=torch.int32, device=device), 16, shape)


def packed(weights_NOI: Tensor) -> list[PackedLinear]:
    packer = Packer(is_batch_invariant=True)
    return [
        PackedLinear(
            weight.shape[1], weight.shape[0], weight.dtype, weight.device, packer.pack(weight, None, is_grouped=True)
        )
        for weight in weights_NOI
    ]


@pytest.mark.parametrize("dtype", head_cases.TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", head_cases.SHAPES[1:] if IS_INTERPRETING else head_cases.SHAPES, ids=str)
def test_head_linear(device: torch.device, seed: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Also with more rows than a tile has, and rows that are parts of others."""
    num_heads, num_inputs, num_outputs, width = shape
    weights = random(num_heads, num_outputs, num_inputs, dtype=dtype, seed=seed, scale=num_inputs**-0.5)
    x = random(140, num_heads, width + 3, dtype=dtype, seed=seed + 1)[:, :, :width]
    heads, on_device = packed(weights.to(device)), x.to(device)
    whole = head_gpu.head_linear(on_device, heads).cpu()
    assert_close(whole, head_reference.head_linear(x, weights), head_cases.TOLERANCES[dtype])
    for rows in (slice(0, 1), slice(70, 75), slice(3, 67)):
        assert torch.equal(head_gpu.head_linear(on_device[rows], heads).cpu(), whole[rows]), rows


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("name", latent_cases.CASES)
def test_latent_heads(device: torch.device, seed: int, name: str, dtype: torch.dtype) -> None:
    """Latent vectors and rotated parts are columns of one product."""
    num_heads, widths = latent_cases.CASES[name]
    num_heads += 6  # more than a program has
    queries = random(5, num_heads, widths.query, dtype=dtype, seed=seed)
    q_latent = random(5, num_heads * widths.latent, dtype=dtype, seed=seed + 1)
    made = random(5, widths.key, dtype=dtype, seed=seed + 2).to(device)
    angles = random(5, widths.rotary // 2, seed=seed + 3)
    latent, k_rotary = made.split([widths.latent, widths.rotary], dim=1)
    inputs = [
        queries.to(device),
        q_latent.to(device),
        latent,
        k_rotary,
        angles.cos().to(device),
        angles.sin().to(device),
    ]
    whole = latent_gpu.latent_heads(*inputs, widths)
    expected = latent_reference.latent_heads(*(tensor.cpu() for tensor in inputs), widths)
    for ours, other in zip(whole, expected, strict=True):
        assert_close(ours.cpu(), other.to(dtype), cases.TOLERANCES[dtype])
    for ours, all_rows in zip(latent_gpu.latent_heads(*(x[2:4] for x in inputs), widths), whole, strict=True):
        assert torch.equal(ours, all_rows[2:4])


def test_keys_are_stored_without_values(device: torch.device) -> None:
    """And padding is not stored."""
    keys, cache = random(3, 1, 24, dtype=BF16), torch.zeros(4, 1, 16, 24, dtype=BF16, device=device).transpose(1, 2)
    slots = torch.tensor([17, -1, 2], device=device)
    store_gpu.store_kv(keys.to(device), None, cache, cache[..., :16], slots)
    expected = torch.zeros(64, 24, dtype=BF16)
    expected[[17, 2]] = keys[[0, 2], 0]
    assert torch.equal(cache.cpu().flatten(0, 2), expected)
