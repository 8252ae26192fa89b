"""The messages between `octavo quantize` and the process that does the work: one JSON object per line."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Format = Literal["int8", "int4", "fp8", "gptq", "awq", "gguf"]
GgufType = Literal["Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"]

CALIBRATED: frozenset[Format] = frozenset({"gptq", "awq"})
"""Formats whose rounding depends on a calibration text."""


class QuantizationJob(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint to quantize."""

    source: str
    """Directory in Hugging Face layout, with safetensors."""
    out: str
    """A new or empty directory; for GGUF, a file."""
    format: Format
    group_size: Annotated[int, Meta(ge=16)] = 128
    """Number of inputs that share a scale; for int4, gptq and awq."""
    calibration: str | None = None
    """Path of a text file."""
    num_samples: Annotated[int, Meta(ge=1)] = 128
    sample_tokens: Annotated[int, Meta(ge=16)] = 512
    orders_by_activation: bool = False
    """Whether GPTQ rounds the inputs with the largest activations first (`desc_act`)."""
    gguf_type: GgufType = "Q8_0"
    gguf_metadata: dict[str, bool | int | float | str | list[str | int | float]] = {}
    """For GGUF: all metadata of the file."""


class Progress(Struct, frozen=True, tag="progress"):
    """The completed fraction of the work."""

    fraction: float


class Finished(Struct, frozen=True, tag="finished"):
    """The checkpoint was written."""

    num_layers: int
    """Number of quantized linear layers."""
    num_bytes: int
    """Bytes of all written tensors."""


class Failed(Struct, frozen=True, tag="failed"):
    """Nothing usable was written."""

    message: str
    hint: str


Report = Progress | Finished | Failed
