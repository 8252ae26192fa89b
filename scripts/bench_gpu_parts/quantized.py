"""Formats of quantized weights that are measured and estimated; imports no torch."""

from dataclasses import dataclass
from typing import Literal

from bench_gpu_parts.mixtures import MixtureName
from bench_gpu_parts.shapes import ShapeName

QuantizedName = Literal["GPTQ", "Q4_K", "mxfp4", "Q8_0", "w8a16", "block fp8 of Ampere", "w8a8", "block fp8", "fp8"]
ROWS = (1, 16, 64, 2048, 8192)
MODEL: ShapeName = "Llama-3.1-8B"
LAYER = ("qkv", "out", "gate_up", "down")
"""Names of the products of a layer."""


@dataclass(frozen=True)
class Format:
    """A packed format; see `octavo.kernels.linear.gpu_quantized_layout`."""

    kind: Literal["u4", "e2m1", "u8", "e4m3", "s8", "f8"]
    group_size: int
    """Inputs that share a scale; 0: one scale per output."""
    other: Literal["none", "shift", "minimum"]
    scale_type: Literal["bfloat16", "float16", "float32"]
    loop_instructions: tuple[float, float]
    """Instructions of a warp on Hopper for one block of inputs, counted in machine code: in a tile of 16 rows, where an
    iteration of most formats multiplies two blocks, and in the largest tile."""
    end_instructions: tuple[int, int]
    """Instructions outside of the loop over inputs, in a tile of 16 rows: of each program, and of its last one."""

    @property
    def code_bits(self) -> int:
        """Bits of a weight."""
        return 4 if self.kind in ("u4", "e2m1") else 8

    @property
    def scale_bytes(self) -> float:
        """Bytes of a group's scale, with its offset if there is one; two bare 16-bit scales share a word."""
        return 4.0 if self.other != "none" or self.scale_type == "float32" else 2.0

    def weight_bytes(self, num_outputs: int, num_inputs: int) -> float:
        """Return the bytes of a weight matrix."""
        num_groups = num_inputs / self.group_size if self.group_size else 1
        return num_outputs * (num_inputs * self.code_bits / 8 + num_groups * self.scale_bytes)


FORMATS: dict[QuantizedName, Format] = {
    "GPTQ": Format("u4", 128, "minimum", "bfloat16", (233, 187), (321, 237)),
    "Q4_K": Format("u4", 32, "minimum", "bfloat16", (243, 194), (335, 235)),
    "mxfp4": Format("e2m1", 32, "none", "bfloat16", (291, 217), (314, 232)),
    "Q8_0": Format("u8", 32, "none", "float16", (303.5, 205), (325, 220)),
    "w8a16": Format("u8", 0, "none", "float32", (132.5, 119), (270, 265)),
    "block fp8 of Ampere": Format("e4m3", 128, "none", "float32", (358, 236), (318, 222)),
    "w8a8": Format("s8", 0, "none", "float32", (85, 86), (277, 254)),
    "block fp8": Format("f8", 128, "none", "float32", (148, 208), (359, 221)),
    "fp8": Format("f8", 0, "none", "float32", (101, 150), (261, 278)),
}
ODD_LOOP_INSTRUCTIONS: dict[QuantizedName, float] = {"mxfp4": 332}
"""Instructions for a block of a weight with an odd number of blocks, such as those of GPT-OSS-20B's experts: an
iteration multiplies one block, and the last one is not whole. The most of gates, ups and downs in tiles of 16 rows."""
QUANTIZED_MIXTURES: dict[QuantizedName, MixtureName] = {
    "GPTQ": "Qwen3-30B-A3B",
    "block fp8": "Qwen3-30B-A3B",
    "mxfp4": "GPT-OSS-20B",
}
"""Mixtures in the formats in which they are published."""
