"""Quantizes a checkpoint: selects the method, and combines reading, rounding and writing."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.protocol.errors import ConfigError
from octavo.protocol.quantization_job import CALIBRATED, Finished, QuantizationJob
from octavo.worker_proc.quantization import awq, formats, gptq
from octavo.worker_proc.quantization.calibration import Blocks, linears_of
from octavo.worker_proc.quantization.checkpoint import Source, Target
from octavo.worker_proc.quantization.rounding import to_groups
from octavo.worker_proc.quantization.targets import layer_of, linear_layers, skeleton

_CALIBRATION_SHARE = 0.9
"""Share of calibration in the progress of a job."""

_WORD = 8
"""4-bit levels in an int32."""


def quantize(job: QuantizationJob, report: Callable[[float], None]) -> Finished:
    """Run a job.

    Args:
        job: the job to run.
        report: called with the finished fraction of the work.

    Raises:
        ConfigError: the model or the text is not suitable; nothing is left at the job's `out`.
    """
    source = Source(Path(job.source))
    if job.format == "gguf":
        from octavo.worker_proc.quantization.gguf import write_gguf

        return write_gguf(job, source, report)
    linears, kept = linear_layers(skeleton(source.config, job.source))
    if job.format in CALIBRATED:
        _require_known_layers(job, source, linears)
    with Target(Path(job.out), source) as target:
        done = _calibrated(job, report) if job.format in CALIBRATED else Calibrated({}, {})
        before = _CALIBRATION_SHARE if job.format in CALIBRATED else 0.0
        written: set[str] = set()
        num_read = 0
        for name, tensor in source.tensors():
            if layer := layer_of(name, linears):
                written.add(layer)
                target.write(done.layers.pop(layer) if layer in done.layers else _rounded(job, layer, tensor))
            else:
                target.write([(name, done.others.get(name, tensor))])
            num_read += tensor.nbytes
            report(before + (1 - before) * num_read / source.num_bytes)
        if missing := linears - written:
            raise ConfigError(
                f"the checkpoint has no tensor {min(missing)}.weight, of which transformers knows",
                hint="quantize a checkpoint whose layers have the names that transformers gives them",
            )
        target.finish(_config(job, kept))
    return Finished(len(written), target.num_bytes)


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Result of the calibration of a checkpoint."""

    layers: dict[str, list[tuple[str, Tensor]]]
    """Tensors of each quantized layer."""
    others: dict[str, Tensor]
    """Other tensors that were changed, by name."""


def _rounded(job: QuantizationJob, layer: str, weight_OI: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a layer that is rounded without a text."""
    _require_divisible(job, layer, weight_OI)
    match job.format:
        case "int8":
            return formats.int8_tensors(layer, weight_OI)
        case "fp8":
            return formats.fp8_tensors(layer, weight_OI)
    return formats.int4_tensors(layer, weight_OI, job.group_size)


def _require_known_layers(job: QuantizationJob, source: Source, linears: set[str]) -> None:
    for name, _ in source.tensors():
        layer = layer_of(name, linears)
        if layer is not None and layer not in linears:
            raise ConfigError(
                f"--format {job.format} does not know {layer}, which transformers loads together with others",
                hint="use int8, int4 or fp8 for models with experts",
            )


def _calibrated(job: QuantizationJob, report: Callable[[float], None]) -> Calibrated:
    """Quantize all layers with the text of the job."""
    blocks = Blocks(job)
    if job.format == "awq":
        awq.require_known(blocks.model)
    done = Calibrated({}, {})
    for number, (name, block) in enumerate(blocks):
        for layer, linear in linears_of(block).items():
            _require_divisible(job, f"{name}.{layer}", linear.weight)
        tensors = _awq(job, name, block, blocks) if job.format == "awq" else _gptq(job, name, block, blocks)
        done.layers.update(tensors)
        done.others.update({f"{name}.{own}": values for own, values in block.named_parameters()})
        report(_CALIBRATION_SHARE * (number + 1) / len(blocks))
    return done


def _gptq(job: QuantizationJob, name: str, block: nn.Module, blocks: Blocks) -> dict[str, list[tuple[str, Tensor]]]:
    """Quantize the linear layers of a block in place. Return their tensors by name."""
    names = {linear: f"{name}.{layer}" for layer, linear in linears_of(block).items()}
    together = blocks.with_equal_inputs(names)
    hessians = {group[0]: gptq.Hessian(group[0].in_features) for group in together}
    blocks.see_inputs(hessians, lambda linear, rows_TI: hessians[linear].add(rows_TI))
    done = {}
    for group in together:
        weight_OI = torch.cat([linear.weight for linear in group])
        hessian = hessians.pop(group[0])
        rounded = gptq.round_weight(weight_OI, hessian, job.group_size, orders_by_activation=job.orders_by_activation)
        for linear, part in zip(group, rounded.split([linear.out_features for linear in group]), strict=True):
            tensors = formats.gptq_tensors(names[linear], part.levels, part.group_of_input_I)
            done[names[linear]] = list(tensors)
            linear.weight.copy_(part.values())
    return done


def _awq(job: QuantizationJob, name: str, block: nn.Module, blocks: Blocks) -> dict[str, list[tuple[str, Tensor]]]:
    """Scale a block and quantize its linear layers in place. Return their tensors by name."""
    seen = awq.scale_block(block, blocks, job.group_size)
    done = {}
    for layer, linear in linears_of(block).items():
        importance_I = seen[linear].square_I
        groups = to_groups(linear.weight, job.group_size, is_symmetric=False, importance_I=importance_I)
        done[f"{name}.{layer}"] = list(formats.awq_tensors(f"{name}.{layer}", groups))
        linear.weight.copy_(groups.values())
    return done


def _require_divisible(job: QuantizationJob, layer: str, weight_OI: Tensor) -> None:
    num_outputs, num_inputs = weight_OI.shape
    if job.format in ("int8", "fp8"):
        return
    if num_inputs % job.group_size or num_outputs % _WORD or job.group_size % _WORD:
        fitting = math.gcd(num_inputs, 128)
        can_fit = num_outputs % _WORD == 0 and fitting % _WORD == 0
        raise ConfigError(
            f"{layer} has {num_inputs} inputs and {num_outputs} outputs, which groups of {job.group_size} inputs and "
            f"words of {_WORD} outputs do not divide",
            hint=f"use --group-size {fitting}" if can_fit else "use --format int8 or fp8",
        )


def _config(job: QuantizationJob, kept: list[str]) -> dict[str, Any]:
    match job.format:
        case "gptq":
            return formats.gptq_config(job.group_size, orders_by_activation=job.orders_by_activation)
        case "awq":
            return formats.awq_config(job.group_size)
    return formats.compressed_config(job.format, kept, job.group_size)
