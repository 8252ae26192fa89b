"""Cost of batch-invariant row tiles: `octavo.kernels.linear` compared with one torch product on the CPU.

It also shows why tiles are needed: how many different results a row has when the batch has 1, 2, ... rows.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from octavo.kernels.linear import Packer, linear

SHAPES = {"q, k and v": (576, 960), "gate and up": (576, 3072), "down": (1536, 576), "vocabulary": (576, 49152)}
NUM_ROWS = [1, 16, 64, 256]
NUM_ROUNDS = 15

Product = Callable[[Tensor], Tensor]


def main() -> None:
    """Print one line for each dtype and shape."""
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, best of {NUM_ROUNDS}; at once -> in tiles")
    print(f"{'dtype':>9} {'product':>12} {'ways':>7}" + "".join(f"{f'{rows} rows, ms':>18}" for rows in NUM_ROWS))
    for dtype in (torch.float32, torch.bfloat16):
        for name, (num_inputs, num_outputs) in SHAPES.items():
            x = torch.randn(max(NUM_ROWS), num_inputs).to(dtype)
            weight = torch.randn(num_outputs, num_inputs).to(dtype)
            at_once = partial(torch.nn.functional.linear, weight=weight)
            in_tiles = partial(linear, packed=Packer(weight.device).pack(weight))
            ways = f"{num_ways(at_once, x)} -> {num_ways(in_tiles, x)}"
            line = f"{str(dtype).removeprefix('torch.'):>9} {name:>12} {ways:>7}"
            for rows in NUM_ROWS:
                costs = f"{cost_ms(at_once, x[:rows]):.2f} -> {cost_ms(in_tiles, x[:rows]):.2f}"
                line += f"{costs:>18}"
            print(line, flush=True)


def num_ways(product: Product, x: Tensor) -> int:
    """Return how many different results row 0 has, over the numbers of rows from 1 to 64."""
    return len({product(x[:rows])[0].float().numpy().tobytes() for rows in range(1, 65)})


def cost_ms(product: Product, x: Tensor) -> float:
    """Return the fastest of several rounds: other load on the machine only adds time."""
    best = float("inf")
    for _ in range(NUM_ROUNDS):
        started = time.perf_counter()
        product(x)
        best = min(best, time.perf_counter() - started)
    return 1e3 * best


if __name__ == "__main__":
    main()
