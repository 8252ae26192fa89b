"""Calls the native `linear` in all ways that must give the same bits."""

import torch
from native_checks import beside_others
from torch import Tensor

from octavo.kernels.linear.native import GATED_EPILOGUES, Epilogue, NativeLinear, arguments
from octavo.kernels.native.arguments import Matrix
from octavo.kernels.native.direct import run
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.quantize.native import quantize_rows


def multiply(
    library: NativeLibrary,
    x: Tensor,
    packed: NativeLinear,
    *,
    epilogue: Epilogue = "none",
    residual: Tensor | None = None,
    out: Tensor | None = None,
    num_threads: int = 1,
) -> Tensor:
    """Multiply rows of the type that the weight is packed for, float32 for f16, any float for quantized ones."""
    if out is None:
        width = packed.num_outputs // 2 if epilogue in GATED_EPILOGUES else packed.num_outputs
        out = torch.full((len(x), width), 7.0)
    inputs = [x]
    if packed.is_quantized:
        rows = quantize_rows(library, x, packed.input_form, num_threads)
        inputs = [rows.levels_TI, rows.scale_TG, rows.sum_TG]
    call = arguments(
        [Matrix.of(tensor) for tensor in inputs],
        packed,
        Matrix.of(out),
        epilogue=epilogue,
        residual=None if residual is None else Matrix.of(residual),
    )
    run(library, "linear", call, num_rows=len(x), num_threads=num_threads)
    return out


def assert_product(library: NativeLibrary, x: Tensor, packed: NativeLinear, expected: Tensor, tolerance: float) -> None:
    """Check a product, and that each row has the same bits in any batch, on any number of threads, in any view."""
    whole = multiply(library, x, packed)
    error = (whole.double() - expected).abs().max()
    assert error <= tolerance * expected.abs().max().clamp(min=1e-30), f"error {error}"
    num_rows = len(x)
    for num_threads in (2, 3):
        assert torch.equal(multiply(library, x, packed, num_threads=num_threads), whole), f"{num_threads} threads"
    for first, last in [(0, 1), (num_rows - 1, num_rows), (num_rows // 2, num_rows), (0, min(5, num_rows))]:
        alone = multiply(library, x[first:last], packed, num_threads=2)
        assert torch.equal(alone, whole[first:last]), (first, last)
    view = beside_others(torch.zeros_like(whole), fill=5.0)
    assert view._base is not None
    assert torch.equal(multiply(library, beside_others(x), packed, out=view), whole)
    view.fill_(5.0)
    assert torch.equal(view._base, torch.full_like(view._base, 5.0)), "wrote beside its rows"
