"""Towers: their speed and that of their attention, and whether other items in a run change the bits of an item."""

from typing import Any

import numpy as np
import torch
from bench_gpu_parts.timing import DEVICE, IS_ON_GPU, captured, normal, num_copies, release_memory, seconds_of
from bench_gpu_parts.towers import TINY_RUN, TOWER_RUNS, TOWERS, Tower, TowerName, TowerRun, TowerRunName
from gpu_tower_estimates import estimate_attention
from torch import Tensor
from torch.nn import functional

from first_look_parts.figures import cell_result, figure
from octavo.kernels.linear import Packer
from octavo.kernels.varlen_attention import Parts
from octavo.kernels.varlen_attention.gpu import varlen_attention
from octavo.protocol.config.facts import MediaFacts
from octavo.worker_proc.device.cuda_stream import CudaStream
from octavo.worker_proc.media.device_tower import DeviceTower
from octavo.worker_proc.models.vision.registry import build_towers
from octavo.worker_proc.models.vision.tower import MediaTower, Patches, TowerSpec
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.weights.dummy import fill_dummy

LEAST_S = 0.05
"""Minimum time of one measurement in seconds."""


@torch.inference_mode()
def tower_attention(name: TowerRunName) -> dict[str, Any]:
    """Return the microseconds of a layer's attention, ours and torch's, and the parts whose bits depend on the run."""
    run = TOWER_RUNS[name] if IS_ON_GPU else TINY_RUN
    key, title = f"tower-{name}", f"attention of a tower, {name}, {run.num_parts} x {run.length}"
    estimate, bound = estimate_attention(run, "H200"), [(float(run.num_bytes), run.flops)]
    figures = [figure(key, title, "us", 1e6 * estimate.seconds, column="estimate")]
    copies = num_copies(run.num_bytes)
    rows = [normal(run.num_rows, 3, run.num_heads, run.head_dim) for _ in range(copies)]
    parts = _parts([run.length] * run.num_parts)
    attend = captured(lambda copy: _attend(rows[copy], parts, run), copies)
    columns = {"octavo": seconds_of(attend, LEAST_S) / copies}
    if IS_ON_GPU:
        dense = [each.unflatten(0, (run.num_parts, -1)).permute(2, 0, 3, 1, 4).contiguous() for each in rows]
        theirs = captured(lambda copy: functional.scaled_dot_product_attention(*dense[copy]), copies)
        columns["sdpa"] = seconds_of(theirs, LEAST_S) / copies
    for column, spent_s in columns.items():
        figures.append(figure(key, title, "us", 1e6 * spent_s, column=column, seconds=spent_s, bound=bound))
    whole, alone = _attend(rows[0], parts, run), _parts([run.length])
    differing = [
        index
        for index, (one, out) in enumerate(zip(rows[0].split(run.length), whole.split(run.length), strict=True))
        if not torch.equal(_attend(one, alone, run), out)
    ]
    release_memory()
    return _result(figures, f"attention of a tower, {name}", f"bits-tower-{name}", differing)


@torch.inference_mode()
def tower(name: TowerName) -> dict[str, Any]:
    """Return the milliseconds of a run of a complete tower, and whether an item has the same bits among others."""
    own = TOWERS[name]
    lengths = own.lengths if IS_ON_GPU else own.tiny_lengths
    built, runs, num_weights = _tower(own, max(lengths))
    items = [_item(built, num_rows, seed) for seed, num_rows in enumerate(lengths)]
    runs.warm_up()
    spent_s = seconds_of(lambda: runs.run(items[:1]), LEAST_S)
    attention = 4.0 * own.num_layers * own.width * lengths[0] ** 2
    key, title = f"tower-of-{name}", f"a tower, {name}, {own.row}, launched kernel by kernel"
    bound = [(0.0, 2.0 * lengths[0] * num_weights + attention)]
    figures = [figure(key, title, "ms", 1e3 * spent_s, seconds=spent_s, bound=bound, digits=2)]
    together = runs.run(items)
    differing = [
        index
        for index, (item, rows) in enumerate(zip(items, together, strict=True))
        if not torch.equal(runs.run([item])[0], rows)
    ]
    release_memory()
    return _result(figures, f"a tower, {name}", f"bits-{key}", differing)


def _result(figures: list[dict[str, Any]], title: str, key: str, differing: list[int]) -> dict[str, Any]:
    bits = figure(key, f"{title}: parts whose company changes bits", "", len(differing), digits=0)
    lines = [f"BITS DIFFER, {title}: parts {differing}"] if differing else []
    return cell_result([*figures, bits], differing, lines)


def _parts(lengths: list[int]) -> Parts:
    return Parts.of(np.array(lengths), lambda tiles: torch.from_numpy(tiles).to(DEVICE))


def _attend(qkv: Tensor, parts: Parts, run: TowerRun) -> Tensor:
    return varlen_attention(qkv[:, 0], qkv[:, 1], qkv[:, 2], parts, run.head_dim**-0.5)


def _tower(tower: Tower, max_rows: int) -> tuple[MediaTower, DeviceTower, float]:
    """Return a tower with random weights, its runner, and the number of weights that each row is multiplied with."""
    config = tower.config if IS_ON_GPU else tower.tiny_config
    width = config.get("vision_config", {}).get("hidden_size", tower.width)
    facts = MediaFacts(architecture=tower.architecture, hf_config=config, token_ids={tower.kind: 0}, processor_path="")
    own = build_towers(TowerSpec(facts, width, Placement(torch.bfloat16, DEVICE), None, -(-max_rows // 4)))[tower.kind]
    assert isinstance(own, MediaTower), "a tower that runs in steps"
    fill_dummy(own.named_parameters(), 0)
    num_weights = sum(
        tensor.numel() * next((times for start, times in tower.uses.items() if name.startswith(start)), 1.0)
        for name, tensor in own.named_parameters()
        if tensor.ndim > 1
    )
    own.pack(Packer(DEVICE, is_batch_invariant=True))
    if IS_ON_GPU:
        return own, DeviceTower(own, CudaStream(DEVICE)), num_weights
    from fake_stream import FakeStream  # a module of the tests, which are on the path in dry runs

    return own, DeviceTower(own, FakeStream()), num_weights


def _item(own: MediaTower, num_rows: int, seed: int) -> Patches:
    """Return an item of random numbers; the order of its rows does not matter here."""
    blank = own.blank(num_rows)
    generator = np.random.default_rng(seed)
    angles = [generator.uniform(-1.0, 1.0, table.shape).astype(np.float32) for table in blank.tables]
    numbers = generator.standard_normal(blank.rows_TP.shape, dtype=np.float32)
    return Patches(numbers, blank.positions_T, blank.chosen_R, tuple(angles))
