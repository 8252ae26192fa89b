"""Writes a GGUF file, tensor by tensor, with the quantizers of the `gguf` package."""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from octavo.protocol.errors import ConfigError
from octavo.protocol.quantization_job import Finished, QuantizationJob
from octavo.worker_proc.quantization.checkpoint import Source, writing
from octavo.worker_proc.weights.rope_order import rope_order

_OUTERS = ("token_embd.weight", "output.weight")
"""Matrices over the vocabulary. They get at least 8 bits, because llama.cpp gives them more than the others, too."""
_WHOLE = (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
_FACTORS = "rope_freqs.weight"
_PROJECTIONS = re.compile(r"\.self_attn\.([qk])_proj\.")


def write_gguf(job: QuantizationJob, source: Source, report: Callable[[float], None]) -> Finished:
    """Write the file of a job.

    Raises:
        ConfigError: the file exists already or cannot be written, or a tensor has no GGUF name.
    """
    out = Path(job.out)
    if out.exists():
        raise ConfigError(f"{out} exists already", hint="name another OUT, or remove it")
    arch = str(job.gguf_metadata["general.architecture"])
    partial = out.with_suffix(".partial")
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            with closing(gguf.GGUFWriter(partial, arch)) as writer:
                for key, value in job.gguf_metadata.items():
                    if key != "general.architecture":
                        _add(writer, key, value)
                finished = _write_tensors(writer, job, source, arch, report)
            partial.rename(out)  # closed, so all of it is in the file
        finally:
            partial.unlink(missing_ok=True)
    return finished


def _write_tensors(
    writer: Any, job: QuantizationJob, source: Source, arch: str, report: Callable[[float], None]
) -> Finished:
    names = _names(source, arch)
    kinds = {name: _kind(names[name], tensor, job) for name, tensor in _tensors(source, arch)}
    for name, tensor in _tensors(source, arch):
        block, block_bytes = gguf.GGML_QUANT_SIZES[kinds[name]]
        num_bytes = tensor.numel() // block * block_bytes
        # The element type is not bytes: the shape counts elements.
        writer.add_tensor_info(names[name], tuple(tensor.shape), np.dtype(np.float32), num_bytes, raw_dtype=kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    num_written = num_read = 0
    for name, tensor in _tensors(source, arch):
        data = gguf.quants.quantize(np.ascontiguousarray(tensor.float().numpy()), kinds[name])
        writer.write_tensor_data(data)
        num_written += data.nbytes
        num_read += tensor.nbytes
        report(min(1.0, num_read / source.num_bytes))
    num_layers = sum(kind not in _WHOLE and names[name] not in _OUTERS for name, kind in kinds.items())
    return Finished(num_layers, num_written)


def _names(source: Source, arch: str) -> dict[str, str]:
    """Return the name of each tensor in the file.

    Raises:
        ConfigError: a tensor has no GGUF name.
    """
    (number,) = (number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    known = gguf.get_tensor_name_map(number, source.config["num_hidden_layers"])
    names = {}
    for name, _ in _tensors(source, arch):
        own = _FACTORS if name == _FACTORS else known.get_name(name, try_suffixes=(".weight", ".bias"))
        if own is None:
            raise ConfigError(f"a GGUF file of architecture {arch} has no tensor for {name}", hint="use another format")
        names[name] = own
    return names


def _kind(name: str, tensor: Tensor, job: QuantizationJob) -> GGMLQuantizationType:
    if tensor.ndim == 1:
        return GGMLQuantizationType.F32
    kind = GGMLQuantizationType[job.gguf_type]
    if name in _OUTERS:
        kind = GGMLQuantizationType.Q8_0
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    return GGMLQuantizationType.F16 if tensor.shape[-1] % block else kind


def _tensors(source: Source, arch: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the file under their checkpoint names, with queries and keys in the file's row order."""
    heads = {"q": source.config["num_attention_heads"]}
    heads["k"] = source.config.get("num_key_value_heads") or heads["q"]
    for name, tensor in source.tensors():
        match = _PROJECTIONS.search(name) if arch == "llama" else None
        yield name, rope_order(tensor, heads[match[1]]) if match else tensor
    if (factors_C := _llama3_factors(source.config)) is not None:
        yield _FACTORS, factors_C


def _llama3_factors(config: dict[str, Any]) -> Tensor | None:
    """Return the divisors of the rotary frequencies of Llama 3.1 (its paper does not say how; transformers does)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) != "llama3":
        return None
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    theta = float(rope.get("rope_theta") or config["rope_theta"])
    lengths_C = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    original, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    smooth_C = ((original / lengths_C - low) / (high - low)).clamp(0, 1)
    shares_C: Tensor = (1 - smooth_C) / rope["factor"] + smooth_C
    return 1 / shares_C


def _add(writer: Any, key: str, value: object) -> None:
    """Add a key with the type that llama.cpp expects."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
