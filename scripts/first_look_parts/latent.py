"""Latent attention: its speed compared with the estimate, and whether bits of a position are the same in every step."""

from typing import Any

from bench_gpu_parts import kernels
from bench_gpu_parts.machine import AttentionCase
from gpu_latent_estimates import CASES, LATENT, TAIL, estimate_latent

from first_look_parts.bits import attention_bits
from first_look_parts.figures import cell_result, figure
from first_look_parts.products import device_name

BITS_LENGTH, BITS_DECODES = 3000, 41


def latent_attention(num_heads: int, *, is_tiny: bool) -> dict[str, Any]:
    """Return the times of one layer, and the rows whose bits differ."""
    cases = [AttentionCase(*case, num_heads, 1, LATENT + TAIL, key_value_dim=LATENT) for case in CASES]
    sizes = (40, 3, num_heads // 16, 1, 24) if is_tiny else (BITS_LENGTH, BITS_DECODES, num_heads, 1, LATENT + TAIL)
    bits = attention_bits(*sizes, key_value_dim=16 if is_tiny else LATENT)
    figures = bits["figures"]
    for case in cases[: 1 if is_tiny else None]:
        name = f"prompt of {case.context}" if case.num_tokens > 1 else f"decode, {case.batch} x {case.context}"
        key = f"latent-{num_heads}-{case.batch}-{case.context}-{case.num_tokens}"
        title = f"latent attention, {num_heads} heads, {name}"
        found = estimate_latent(case.batch, case.context, case.num_tokens, num_heads, device_name())
        measured = AttentionCase(3, 20, 1, 2, 1, 24, key_value_dim=16) if is_tiny else case
        spent_s = kernels.attention("octavo", measured)
        figures.append(figure(key, title, "us", 1e6 * found.seconds, column="estimate"))
        bound = [(found.latent_bytes, found.flops)]
        figures.append(figure(key, title, "us", 1e6 * spent_s, column="octavo", seconds=spent_s, bound=bound))
    return cell_result(figures, {"num_heads": num_heads}, bits["lines"])
