"""What `octavo quantize` tells the process that does the work, and what it reports: one JSON object a line."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Format = Literal["int8", "int4", "fp8", "gptq", "awq", "gguf"]
GgufType = Literal["Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"]

CALIBRATED: frozenset[Format] = frozenset({"gptq", "awq"})
"""Formats whose rounding depends on a text that the model reads."""


class QuantizationJob(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint to quantize."""

    source: str
    """Directory in Hugging Face layout, with safetensors."""
    out: str
    """A directory that does not exist yet, or is empty; of GGUF, a file."""
    format: Format
    group_size: Annotated[int, Meta(ge=16)] = 128
    """Inputs that share a scale; of int4, gptq and awq."""
    calibration: str | None = None
    """A text file."""
    num_samples: Annotated[int, Meta(ge=1)] = 128
    sample_tokens: Annotated[int, Meta(ge=16)] = 512
    orders_by_activation: bool = False
    """GPTQ rounds the inputs with the largest activations first (`desc_act`)."""
    gguf_type: GgufType = "Q8_0"
    gguf_metadata: dict[str, bool | int | float | str | list[str | int | float]] = {}
    """Of GGUF: every key of the file."""


class Progress(Struct, frozen=True, tag="progress"):
    """The share of the work that is done."""

    fraction: float


class Finished(Struct, frozen=True, tag="finished"):
    """The checkpoint is written."""

    num_layers: int
    """Linear layers that were quantized."""
    num_bytes: int
    """Of all tensors that were written."""


class Failed(Struct, frozen=True, tag="failed"):
    """Nothing usable was written."""

    message: str
    hint: str


Report = Progress | Finished | Failed
