"""Kernels that begin before the previous kernel ends: whether bits stay the same, and how much time this saves.

Compares the products, norms and activations of a few layers with and without programmatic dependent launches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from bench_gpu_parts.quantized import QuantizedName
from bench_gpu_parts.quantized_layers import product_of
from bench_gpu_parts.shapes import SHAPES, TINY, ShapeName, weight_shapes
from bench_gpu_parts.timing import DEVICE, IS_ON_GPU, captured, normal, release_memory, seconds_of
from torch import Tensor

from first_look_parts.figures import cell_result, figure
from octavo.kernels.add_rms_norm.gpu import add_rms_norm
from octavo.kernels.linear.gpu_product import InvariantLinear, gpu_of
from octavo.kernels.programmatic_launch import MIN_CAPABILITY, enable
from octavo.kernels.rms_norm.gpu import rms_norm
from octavo.kernels.silu_and_mul.gpu import silu_and_mul

NUM_LAYERS = 6
"""Number of layers: their weights are larger than the second-level cache."""
NUM_TRIALS = 20
EPS = 1e-6
Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """The products of a layer. Attention is left out: its queries stand in for its result."""

    qkv: Product
    out: Product
    gate_up: Product
    """Product of gates and ups, with the activation."""
    down: Product
    norm: Tensor
    width: int
    """Width of the result of attention."""

    @classmethod
    def new(cls, config: dict[str, Any], weights: QuantizedName | None) -> "Layer":
        """Make a layer with random weights in the format `weights`; `None` for 16 bits."""
        shapes, gpu = weight_shapes(config), gpu_of(DEVICE)

        def product(name: str) -> InvariantLinear:
            return InvariantLinear.new(normal(*shapes[name]) * shapes[name][1] ** -0.5, None, gpu)

        if weights is None:
            products: dict[str, Product] = {name: product(name) for name in ("qkv", "out", "down")}
            products["gate_up"] = product("gate_up").silu_and_mul
        else:
            products = {name: product_of(weights, *shapes[name]) for name in ("qkv", "out", "down")}
            gate_up = product_of(weights, *shapes["gate_up"])
            products["gate_up"] = lambda x: silu_and_mul(gate_up(x))
        return cls(**products, norm=normal(config["hidden_size"]), width=shapes["out"][1])

    def __call__(self, hidden: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream and its norm."""
        hidden, x = add_rms_norm(hidden, self.out(self.qkv(x)[:, : self.width]), self.norm, EPS)
        return add_rms_norm(hidden, self.down(self.gate_up(x)), self.norm, EPS)


@torch.inference_mode()
def early_launches(shape: ShapeName, rows: list[int], weights: QuantizedName | None) -> dict[str, Any]:
    """Return the microseconds of a layer without attention, and whether its bits are unchanged."""
    name = shape if weights is None else f"{shape}, {weights}"
    is_possible = IS_ON_GPU and torch.cuda.get_device_capability(DEVICE) >= MIN_CAPABILITY
    layers = [Layer.new(SHAPES[shape] if IS_ON_GPU else TINY, weights) for _ in range(NUM_LAYERS if IS_ON_GPU else 1)]
    figures, differing = [], []
    for num_rows in rows:
        x = normal(num_rows, len(layers[0].norm))
        found: dict[str, list[Tensor]] = {}
        title = f"a layer of {name} without attention, {num_rows} rows"
        for column in ("octavo", "early") if is_possible or not IS_ON_GPU else ("octavo",):
            results: list[Tensor] = []

            def compute(_: int, x: Tensor = x, results: list[Tensor] = results) -> Tensor:
                hidden, y = x, rms_norm(x, layers[0].norm, EPS)
                for layer in layers:
                    hidden, y = layer(hidden, y)
                results[:] = [y]
                return y

            enable(column == "early" and is_possible)
            try:
                replay = captured(compute, 1)
            finally:
                enable(False)
            spent_s = seconds_of(replay) / len(layers)
            found[column] = [results[0].clone() for _ in range(NUM_TRIALS if IS_ON_GPU else 1) if replay() is None]
            figures.append(figure(f"early-{name}-{num_rows}", title, "us", 1e6 * spent_s, column=column))
            del replay
        expected = found["octavo"][0]
        if not all(torch.equal(result, expected) for each in found.values() for result in each):
            differing.append(num_rows)
    figures.append(
        figure(f"bits-early-{name}", "row counts whose bits differ with early launches", "", len(differing), digits=0)
    )
    release_memory()
    lines = [f"BITS DIFFER with early launches, {name}, rows: {differing}"] if differing else []
    return cell_result(figures, {"is_possible": is_possible, "differing": differing}, lines)
