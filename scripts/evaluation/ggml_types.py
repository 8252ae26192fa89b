"""Writes GGUF files with the types that only ggml itself writes: K-quants, IQ types, ternary ones and MXFP4.

ggml's function is called in the library of the `xllamacpp` package, which is installed into a separate environment.
Most of these types have blocks of 256 inputs. A Llama with other sizes, such as SmolLM2-135M with 576, is padded with
zeros so that it computes the same. Its norms divide by the root of a larger mean, for which their weights and epsilon
compensate. Additional heads have queries, keys, values and outputs of zero.
"""

import ctypes
import json
import re
import shutil
from functools import cache
from pathlib import Path
from unittest import mock

import gguf
import msgspec
import numpy as np
from client_environments import python_environment
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from octavo.frontend.model_files.gguf.export import gguf_metadata
from octavo.protocol.quantization_job import QuantizationJob
from octavo.worker_proc.quantization import gguf as writer
from octavo.worker_proc.quantization.checkpoint import Source

PACKAGE = "xllamacpp==2026.10.11549"
BLOCK = 256
TYPES = (
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"),
    *("IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4"),
)


def written(model: Path, kind: str, work: Path, every: int = 1) -> Path:
    """Return a file whose matrices have a type, except those of the vocabulary, which have Q8_0.

    Args:
        model: directory of a Llama with safetensors.
        kind: the name of a type in `TYPES`.
        work: a directory for the file and the padded model, which are written if missing.
        every: the middle one of each `every` blocks has the type, the others have Q8_0.
    """
    out = work / (f"{kind}.gguf" if every == 1 else f"{kind}-every-{every}.gguf")
    if not out.exists():
        _write(padded(model, work), kind, out, every)
    return out


def _write(source: Path, kind: str, out: Path, every: int) -> None:
    job = QuantizationJob(
        source=str(source),
        out=str(out),
        format="gguf",
        gguf_type=kind,  # type: ignore[arg-type]
        gguf_metadata=gguf_metadata(source),
    )
    kind_of = writer._kind

    def kind_in_block(name: str, tensor: Tensor, job: QuantizationJob) -> Type:
        block = re.match(r"blk\.(\d+)\.", name)
        has_type = block is None or int(block[1]) % every == every // 2
        return kind_of(name, tensor, job if has_type else msgspec.structs.replace(job, gguf_type="Q8_0"))

    with (
        mock.patch.object(gguf.quants, "quantize", quantize),
        mock.patch.object(writer, "_kind", kind_in_block),
    ):
        writer.write_gguf(job, Source(source), lambda _: None)


def padded(model: Path, work: Path) -> Path:
    """Return the directory of the padded model, which is written if missing."""
    out = work / f"{model.name}-padded"
    if not out.exists():
        pad(model, out)
    return out


def pad(model: Path, out: Path) -> None:
    """Write a Llama without biases that computes the same and whose sizes are multiples of 256."""
    config = json.loads((model / "config.json").read_text())
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    wide, wide_intermediate = (-(-size // BLOCK) * BLOCK for size in (hidden, intermediate))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    wide_heads, wide_kv_heads = heads * wide // hidden, kv_heads * wide // hidden
    assert wide_heads * hidden == heads * wide and wide_kv_heads * hidden == kv_heads * wide, "heads must fit too"
    head_dim = config.get("head_dim") or hidden // heads
    lengths = {
        "o_proj": (wide, wide_heads * head_dim),
        "down_proj": (wide, wide_intermediate),
        "q_proj": (wide_heads * head_dim, wide),
        "k_proj": (wide_kv_heads * head_dim, wide),
        "v_proj": (wide_kv_heads * head_dim, wide),
        "gate_proj": (wide_intermediate, wide),
        "up_proj": (wide_intermediate, wide),
    }

    def wider(name: str, values: Tensor) -> Tensor:
        values = values.float()
        if values.ndim == 1:
            return nn.functional.pad(values * (hidden / wide) ** 0.5, (0, wide - hidden))
        rows, columns = lengths.get(name.split(".")[-2], (len(values), wide))
        return nn.functional.pad(values, (0, columns - values.shape[1], 0, rows - values.shape[0]))

    draft = out.with_name(f"{out.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(model, draft, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = {name: wider(name, values) for name, values in load_file(model / "model.safetensors").items()}
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    config |= {"hidden_size": wide, "intermediate_size": wide_intermediate, "head_dim": head_dim}
    config |= {"num_attention_heads": wide_heads, "num_key_value_heads": wide_kv_heads}
    config |= {"rms_norm_eps": config["rms_norm_eps"] * hidden / wide, "torch_dtype": "float32"}
    (draft / "config.json").write_text(json.dumps(config))
    draft.rename(out)


def quantize(values: np.ndarray, kind: Type) -> np.ndarray:
    """Return the bytes of the rows of a matrix. Every input has the same importance."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if kind in (Type.F32, Type.F16):
        return values.astype(np.float32 if kind is Type.F32 else np.float16)
    values = np.ascontiguousarray(values, np.float32)
    rows, columns = values.shape
    out = np.empty((rows, columns // block * block_bytes), np.uint8)
    library = ggml()
    importances = np.ones(columns, np.float32) if library.ggml_quantize_requires_imatrix(int(kind)) else None
    written = library.ggml_quantize_chunk(
        int(kind),
        values.ctypes.data,
        out.ctypes.data,
        0,
        rows,
        columns,
        importances.ctypes.data if importances is not None else None,
    )
    assert written == out.nbytes, f"ggml wrote {written} bytes of {out.nbytes}"
    return out


@cache
def ggml() -> ctypes.CDLL:
    """Return the library of ggml, with the signatures of two functions declared.

    Raises:
        NotInstallable: the package cannot be installed.
    """
    environment = python_environment((PACKAGE,))
    (file,) = environment.path.glob("lib/python*/site-packages/xllamacpp/xllamacpp*.so")
    library = ctypes.CDLL(str(file))
    library.ggml_quantize_requires_imatrix.argtypes = [ctypes.c_int]
    library.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    return library
