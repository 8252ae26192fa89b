"""Requirements of tensor parallel ranks on GPUs: products with one order of sums, and sums over several GPUs."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench_gpu_parts.shapes import SHAPES, TINY, ShapeName, weight_shapes
from bench_gpu_parts.timing import DEVICE, IS_ON_GPU, captured, normal, num_copies, release_memory, seconds_of
from gpu_estimates import rank_seconds, sum_seconds
from torch import Tensor

from first_look_parts import rank_sums
from first_look_parts.figures import cell_result, figure
from first_look_parts.products import ELEMENT_BYTES, device_name
from octavo.kernels.linear.gpu import Packer
from octavo.kernels.linear.gpu_product import InvariantLinear, TpInvariantLinear, gpu_of
from octavo.worker_proc.parallel.distributed import tree_sum

NUM_RANKS = (1, 2, 4, 8) if IS_ON_GPU else (1, 2)
NUM_SEGMENTS = 8
LIMIT_S = 60.0
LEAST_S = 0.01
"""Minimum time of one measurement in seconds; there are about a hundred."""
_ROW_PARALLEL = ("out", "down")


@torch.inference_mode()
def tp_invariant(shape: ShapeName, rows: list[int]) -> dict[str, Any]:
    """Return whether a layer's products have the same bits for any number of ranks, and the cost of that.

    All ranks are computed on this GPU, one after another.
    """
    shapes = weight_shapes(SHAPES[shape] if IS_ON_GPU else TINY)
    x = {inputs: normal(max(rows), inputs) for _, inputs in shapes.values()}
    differing, figures = [], []
    for name, (outputs, inputs) in shapes.items():
        weight = normal(outputs, inputs) * inputs**-0.5
        for num_rows in rows:
            found = {count: _result(name, weight, x[inputs][:num_rows], count) for count in NUM_RANKS}
            differing += [
                f"{name}, {num_rows} rows, {n} ranks" for n in NUM_RANKS if not torch.equal(found[n], found[1])
            ]
    for num_rows in rows:
        for count in NUM_RANKS:
            key, title = f"tp-{shape}-{count}-{num_rows}", f"products of a rank of {count}, {shape}, {num_rows} rows"
            estimate_s = rank_seconds(shape, num_rows, count, device_name(), is_tp_invariant=True, has_sums=False)
            figures.append(figure(key, title, "us", 1e6 * estimate_s, column="estimate"))
            for column, is_on in (("octavo", False), ("tp-invariant", True)):
                spent_s = _layer_seconds(shapes, x, num_rows, count, is_tp_invariant=is_on)
                figures.append(figure(key, title, "us", 1e6 * spent_s, column=column, seconds=spent_s))
    title = f"products of {shape} whose bits depend on the number of ranks"
    figures.append(figure(f"bits-tp-{shape}", title, "", len(differing), digits=0))
    release_memory()
    lines = [f"BITS DIFFER with the number of ranks: {'; '.join(differing[:8])}"] if differing else []
    return cell_result(figures, differing, lines)


def _product(
    name: str, part: Tensor, whole_outputs: int, count: int, *, is_tp_invariant: bool = True
) -> InvariantLinear:
    """Return the product of a rank, which has a part of a weight."""
    if not is_tp_invariant:
        return InvariantLinear.new(part, None, gpu_of(DEVICE))
    product = Packer(is_batch_invariant=True, is_tp_invariant=True).pack(part, None, whole_outputs=whole_outputs)
    assert isinstance(product, TpInvariantLinear)
    return product.in_segments(NUM_SEGMENTS, count) if name in _ROW_PARALLEL else product


def _result(name: str, weight: Tensor, x: Tensor, count: int) -> Tensor:
    """Return the product with a weight that is divided among `count` ranks."""
    is_partial = name in _ROW_PARALLEL
    parts = weight.chunk(count, 1 if is_partial else 0)
    products = [_product(name, part.contiguous(), len(weight), count) for part in parts]
    if not is_partial:
        return torch.cat([product(x) for product in products], 1)
    return tree_sum([one(part) for one, part in zip(products, x.chunk(count, 1), strict=True)]).bfloat16()


def _layer_seconds(
    shapes: dict[str, tuple[int, int]], x: dict[int, Tensor], num_rows: int, count: int, *, is_tp_invariant: bool
) -> float:
    """Return the seconds of a layer's products on one rank; each weight is read from memory."""
    spent_s = 0.0
    for name, (outputs, inputs) in shapes.items():
        if name == "head":
            continue
        is_partial = name in _ROW_PARALLEL
        shape = (outputs, inputs // count) if is_partial else (outputs // count, inputs)
        copies = [
            _product(name, normal(*shape), outputs, count, is_tp_invariant=is_tp_invariant)
            for _ in range(num_copies(ELEMENT_BYTES * shape[0] * shape[1]))
        ]
        rows = x[inputs][:num_rows, : shape[1]]
        replay = captured(lambda copy, copies=copies, rows=rows: copies[copy](rows), len(copies))  # type: ignore[misc]
        spent_s += seconds_of(replay, LEAST_S) / len(copies)
        del replay, copies
    return spent_s


def sums(width: int, rows: list[int]) -> dict[str, Any]:
    """Return the time of a sum over all GPUs and the norm after it: in one kernel, by NCCL, and both; and the bits."""
    num_gpus = torch.cuda.device_count() if IS_ON_GPU else 0
    if num_gpus < 2:
        return cell_result([], {"gpus": num_gpus}, ["sums over GPUs: not measured, because there are fewer than two"])
    found = run_ranks("cuda", num_gpus, width, rows)
    if "error" in found:
        return cell_result([], found, [f"sums over GPUs: {found['error']}"])
    figures = []
    for each in found["sums"]:
        parts = "float32" if each["is_float32"] else "bfloat16"
        key = f"sum-{num_gpus}-{each['rows']}-{parts}"
        title = f"sum and norm of {each['rows']} x {width} over {num_gpus} GPUs, parts of {parts}"
        estimate_s = sum_seconds(each["rows"] * width, num_gpus, 4 if each["is_float32"] else ELEMENT_BYTES)
        figures.append(figure(key, title, "us", 1e6 * estimate_s, column="estimate"))
        for column, seconds in each["seconds"].items():
            figures.append(figure(key, title, "us", 1e6 * seconds, column=column))
    differing = [f"{each['rows']} rows" for each in found["sums"] if not each["is_equal"]]
    title = f"sums over {num_gpus} GPUs whose bits differ between one kernel and NCCL with our additions"
    figures.append(figure("bits-sums", title, "", len(differing), digits=0))
    lines = ["sums over GPUs, octavo: NCCL copies, and each GPU adds; NCCL's sum has an order of its own"]
    lines += [f"BITS DIFFER, sums over GPUs: {'; '.join(differing[:8])}"] if differing else []
    return cell_result(figures, found, lines)


def run_ranks(device: str, size: int, width: int, rows: list[int]) -> dict[str, Any]:
    """Return the results of `rank_sums` on rank 0: `sums`, or the `error` of a rank."""
    with tempfile.TemporaryDirectory(prefix="first-look-") as directory:
        rendezvous, log = Path(directory) / "ranks", Path(directory) / "log"
        job = json.dumps({"device": device, "size": size, "width": width, "rows": rows, "rendezvous": str(rendezvous)})
        environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
        with log.open("w") as errors:
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-P", rank_sums.__file__, job, str(rank)],
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=errors,
                    env=environment,
                    text=True,
                )
                for rank in range(size)
            ]
        try:
            output, _ = ranks[0].communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            output = ""
        for rank in ranks:
            rank.kill()
            rank.wait()
        lines = output.splitlines()
        return json.loads(lines[-1]) if lines else {"error": "\n    ".join(log.read_text().splitlines()[-4:])}
