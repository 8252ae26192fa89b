"""Reads a quantized checkpoint: collects the tensors of each layer, and yields one matrix under the plain name."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from octavo.protocol.errors import ConfigError
from octavo.protocol.weight_files import WeightFiles
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore
from octavo.worker_proc.models.linear_weight import QuantizedMatrix
from octavo.worker_proc.weights.quantized.layout import Layout
from octavo.worker_proc.weights.safetensors import read_header, read_safetensors

_CACHE_SCALES = re.compile(r"\.([kqv]_scale|kv_scale|prob_output_scale|[kqv]_proj\.output_scale)$")
"""Scales of keys and values, for caches of 8-bit floats: `worker_proc/weights/cache_scales.py` reads them."""


class Format(Protocol):
    """Names and meaning of the tensors of a quantized layer."""

    markers: tuple[str, ...]
    """Suffixes of tensor names that mark a layer as quantized, if it has a tensor with one of them."""
    parts: tuple[str, ...]
    """All name suffixes of a quantized layer's tensors; tensors with other names are not part of the weight."""

    def matrix(self, layer: str, tensors: Mapping[str, Tensor]) -> QuantizedMatrix:
        """Return the matrix of a layer.

        Args:
            layer: name of the layer in the checkpoint.
            tensors: tensors by part.

        Raises:
            ConfigError: a tensor is missing, or does not fit the others or the configuration.
        """

    def layout(self, layer: str) -> Layout | None:
        """Return the memory layout of a layer, for dummy weights; `None` if it is not quantized."""


@runtime_checkable
class StackFormat(Protocol):
    """A format whose checkpoints may hold all experts of a layer in one tensor, with their scales in others."""

    def places_in_stacks(self, names: Collection[str]) -> dict[str, tuple[str, str]]:
        """Return the stack's name and the part, for each tensor of a quantized stack.

        Args:
            names: names of all tensors of the checkpoint.
        """

    def stack(self, name: str, tensors: Mapping[str, Tensor]) -> QuantizedMatrix:
        """Return a stack.

        Args:
            name: name of the stack in the checkpoint.
            tensors: tensors by part, each with the experts as first dimension.

        Raises:
            ConfigError: a tensor is missing, or does not fit the others or the configuration.
        """


def open_format(config: Mapping[str, Any], metadata: Mapping[str, str]) -> Format:
    """Return the format of a checkpoint.

    Args:
        config: `quantization_config` of config.json.
        metadata: metadata of its files.

    Raises:
        ConfigError: a field requires a feature that octavo does not have.
    """
    match config.get("quant_method", "bitsandbytes"):
        case "gptq" | "gptq_marlin":
            from octavo.worker_proc.weights.quantized.gptq import Gptq

            return Gptq(config)
        case "awq" | "awq_marlin":
            from octavo.worker_proc.weights.quantized.awq import Awq

            return Awq(config)
        case "compressed-tensors":
            from octavo.worker_proc.weights.quantized.compressed_tensors import CompressedTensors

            return CompressedTensors(config)
        case "fp8" | "fbgemm_fp8":
            from octavo.worker_proc.weights.quantized.fp8 import Fp8

            return Fp8(config)
        case "bitsandbytes":
            from octavo.worker_proc.weights.quantized.bitsandbytes import BitsAndBytes

            return BitsAndBytes(config)
        case "torchao":
            from octavo.worker_proc.weights.quantized.torchao import TorchAo

            return TorchAo(config, metadata)
        case "mxfp4":
            return Mxfp4(config)
        case "modelopt" | "modelopt_fp4" | "modelopt_mxfp8" | "modelopt_mixed":
            from octavo.worker_proc.weights.quantized.modelopt import ModelOpt

            return ModelOpt(config)
        case "auto-round" | "intel/auto-round":
            from octavo.worker_proc.weights.quantized.auto_round import AutoRound

            return AutoRound(config)
        case "quark":
            from octavo.worker_proc.weights.quantized.quark import Quark

            return Quark(config)
    raise ConfigError(f"no reader for quantized weights of the method {config.get('quant_method')!r}")


class Mxfp4:
    """The format of GPT-OSS. Each tensor holds all experts of a layer; the model takes them as they are."""

    markers: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    def __init__(self, config: Mapping[str, Any]) -> None:
        checked = CheckedConfig(config, "quantization_config")
        ignore(checked, "quant_method", "modules_to_not_convert", "dequantize")
        checked.reject_unread("mxfp4")

    def matrix(self, layer: str, tensors: Mapping[str, Tensor]) -> QuantizedMatrix:
        """Never called: no layer has parts. `octavo.worker_proc.weights.mxfp4` reads them."""
        raise AssertionError(f"{layer} has no parts")

    def layout(self, layer: str) -> Layout | None:
        """Return the memory layout of a layer."""
        return Layout(4, 32, "e2m1") if ".experts." in layer else None


class Assembly:
    """Collects the tensors of quantized layers.

    Args:
        form: format of the checkpoint.
        names: names of all tensors.
    """

    def __init__(self, form: Format, names: Collection[str]) -> None:
        self._format = form
        self._names = names
        layers = {
            name.removesuffix(f".{marker}") for name in names for marker in form.markers if name.endswith(f".{marker}")
        }
        self._place: dict[str, tuple[str, str]] = {
            name: (layer, part) for layer in layers for part in form.parts if (name := f"{layer}.{part}") in names
        }
        self._stack_format = form if isinstance(form, StackFormat) else None
        self._stacks: set[str] = set()
        if self._stack_format is not None:
            places = self._stack_format.places_in_stacks(names)
            self._stacks = {stack for stack, _ in places.values()}
            self._place |= places
        self._missing: dict[str, set[str]] = {}
        for layer, part in self._place.values():
            self._missing.setdefault(layer, set()).add(part)
        self._tensors: dict[str, dict[str, Tensor]] = {}

    def plain_name(self, name: str) -> str:
        """Return the name of a tensor if its layer were not quantized."""
        if name not in self._place:
            return name
        layer = self._place[name][0]
        return layer if layer in self._stacks else f"{layer}.weight"

    def take(self, name: str, tensor: Tensor) -> tuple[str, Tensor | QuantizedMatrix] | None:
        """Return a tensor, or the matrix of a layer if this is the layer's last tensor; `None` if more of them follow.

        Raises:
            ConfigError: the tensors do not fit one another or the configuration.
        """
        if name not in self._place:
            return None if _CACHE_SCALES.search(name) else (name, _plain(name, tensor, self._names))
        layer, part = self._place[name]
        tensors = self._tensors.setdefault(layer, {})
        tensors[part] = tensor
        if len(tensors) < len(self._missing[layer]):
            return None
        tensors = self._tensors.pop(layer)
        if self._stack_format is not None and layer in self._stacks:
            return layer, self._stack_format.stack(layer, tensors)
        return f"{layer}.weight", self._format.matrix(layer, tensors)


def _plain(name: str, tensor: Tensor, names: Collection[str]) -> Tensor:
    is_weight = name.endswith(".weight") and tensor.ndim > 1
    # Models accept unquantized stacks under these names: without this, the error would be about the tensor of scales.
    is_packed = tensor.dtype == torch.uint8 and f"{name}_weight_scale" in names
    if tensor.ndim > 2 and (is_packed or tensor.dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)):
        scales = sorted(other for other in names if other.startswith(f"{name}_") and "scale" in other)
        where = (
            f"with scales in {scales[-1]!r}, where octavo does not read those of this format"
            if scales
            else "without scales"
        )
        raise ConfigError(
            f"the checkpoint holds {name!r} of type {tensor.dtype} and shape {tuple(tensor.shape)}: a stack of "
            f"quantized experts {where}",
            hint="use a checkpoint whose experts have tensors of their own (experts.0.gate_proj.weight, ...)",
        )
    if is_weight and not (tensor.is_floating_point() and tensor.element_size() > 1):
        raise ConfigError(
            f"the checkpoint holds {name!r} of type {tensor.dtype}, without scales",
            hint="check that no file of the checkpoint is missing, and that config.json belongs to it",
        )
    return tensor


def read_quantized(
    checkpoint: WeightFiles, config: Mapping[str, Any], wants: Callable[[str], bool]
) -> Iterator[tuple[str, Tensor | QuantizedMatrix, int]]:
    """Yield the wanted tensors and matrices, with the bytes that were read for each.

    Args:
        checkpoint: files of the checkpoint.
        config: `quantization_config` of config.json.
        wants: whether a tensor is needed, given its unquantized name.

    Raises:
        ConfigError: a file is damaged or lacks tensors, or a feature is required that octavo does not have.
    """
    names, metadata = read_header(checkpoint)
    form = open_format(config, metadata)
    assembly = Assembly(form, names)
    num_bytes = 0
    for name, tensor, tensor_bytes in read_safetensors(
        checkpoint, lambda name: wants(assembly.plain_name(name)), is_quantized=True
    ):
        num_bytes += tensor_bytes
        if (taken := assembly.take(name, tensor)) is not None:
            yield *taken, num_bytes
            num_bytes = 0
