"""Makes the media encoder of a model, and computes its memory."""

from typing import Any

import msgspec
import torch

from octavo.protocol.config import ResolvedConfig
from octavo.worker_proc.device.base import Device
from octavo.worker_proc.device.stream import Stream
from octavo.worker_proc.media.attended import AttendedItems
from octavo.worker_proc.media.device_tower import DeviceTower
from octavo.worker_proc.media.encoder import KindRunner, MediaEncoder
from octavo.worker_proc.media.host_tower import HostTower
from octavo.worker_proc.media.item_runner import ItemRunner
from octavo.worker_proc.media.tower_runner import TowerRunner, TowerRuns
from octavo.worker_proc.models.audio.item_encoder import ItemEncoder
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.vision.tower import MAX_RUN_SEQUENCES, MediaTower
from octavo.worker_proc.runners.host import HostRunner
from octavo.worker_proc.runners.registry import measure_steps, open_runner


def open_encoder(model: Model, config: ResolvedConfig, stream: Stream | None) -> MediaEncoder | None:
    """Make the encoder of a loaded model; `None` if this worker has none.

    Args:
        model: model with its towers.
        config: sizes of a step, types, threads.
        stream: stream of the device; `None` if the host computes.

    Raises:
        MemoryError, RuntimeError: not enough memory.
    """
    if not model.towers:
        return None
    towers = towers_of(model)
    runners: dict[Any, KindRunner] = {tower: TowerRunner(tower, _open_runs(tower, config, stream)) for tower in towers}
    runners |= {one: ItemRunner(one, stream) for one in model.towers.values() if isinstance(one, ItemEncoder)}
    attended = None
    if model.cross_cache is not None:
        attended = AttendedItems(model, model.cross_cache, towers[0].width, config.num_threads, stream)
    return MediaEncoder({kind: runners[tower] for kind, tower in model.towers.items()}, attended, stream)


def towers_of(model: Model) -> list[MediaTower]:
    """Return the distinct towers of a model that run in steps."""
    return [tower for tower in dict.fromkeys(model.towers.values()) if isinstance(tower, MediaTower)]


def _open_runs(tower: MediaTower, config: ResolvedConfig, stream: Stream | None) -> TowerRuns:
    if stream is not None:
        return DeviceTower(tower, stream)
    own = _own_config(tower, config)
    # Each sequence and each part begins in a block of its own.
    num_blocks = -(-tower.max_rows // own.block_size) + max(MAX_RUN_SEQUENCES, tower.max_parts)
    runner = open_runner(tower, own, None, num_blocks=num_blocks, max_model_len=tower.max_item_rows)
    assert isinstance(runner, HostRunner), "without a stream the host computes"
    return HostTower(tower, runner.forward, own.block_size, config.num_threads)


def encoder_bytes(model: Model, device: Device, config: ResolvedConfig) -> int:
    """Return the memory of the encoder in addition to weights: activations of its largest runs, and kept results."""
    if config.media is None or not model.towers:
        return 0
    if model.cross_cache is not None:
        kept_bytes = model.cross_cache.num_bytes
    else:
        row_bytes = (1 + config.num_deeper_rows) * config.model.embedding_width * model.dtype.itemsize
        kept_bytes = config.media.encoder_cache_tokens * row_bytes
    kept_bytes += sum([tower.run_bytes for tower in model.towers.values() if isinstance(tower, ItemEncoder)])
    return kept_bytes + sum([_run_bytes(tower, device, config) for tower in towers_of(model)])


def _run_bytes(tower: MediaTower, device: Device, config: ResolvedConfig) -> int:
    if (stream := device.stream()) is not None:
        return _device_run_bytes(tower, device, stream)
    if not tower.library:
        return tower.weights_bytes
    return measure_steps(tower, device, _own_config(tower, config)).activation_bytes


@torch.inference_mode()
def _device_run_bytes(tower: MediaTower, device: Device, stream: Stream) -> int:
    """Run the largest item, together with as many blank patches as a run has room for."""
    device.reset_peak()
    num_merged = 1 if tower.merged is None else tower.merged.num_merged
    rest = (tower.max_rows - tower.max_item_rows) // num_merged * num_merged
    lengths = [tower.max_item_rows // num_merged * num_merged, *([rest] if rest else [])]
    DeviceTower(tower, stream).run([tower.blank(num_rows) for num_rows in lengths])
    return device.peak_growth_bytes()


def _own_config(tower: MediaTower, config: ResolvedConfig) -> ResolvedConfig:
    """Return the configuration of an engine that would run only the tower."""
    return msgspec.structs.replace(
        config,
        kv_cache_dtype=config.dtype,
        max_num_batched_tokens=tower.max_rows,
        max_num_seqs=tower.max_rows,
        max_model_len=tower.max_item_rows,
    )
