"""The instructions that make numbers of codes on a GPU, which Triton's interpreter cannot run: evaluated here."""

import re

import pytest
import torch

from octavo.kernels.linear.codebooks import codebook
from octavo.kernels.linear.gpu_quantized_layout import Kind, assembly

FULL = 0xFFFFFFFF
UNITS = {("e2m1", torch.bfloat16): 2.0**126, ("e2m1", torch.float16): 2.0**14, ("e4m3", torch.float32): 2.0**120}


def evaluate(instructions: str, word: int, num_outputs: int) -> list[int]:
    """Run PTX on a word; the operands after the outputs are the word."""
    values = {f"${num_outputs}": word}

    def read(operand: str) -> int:
        return values[operand] if operand in values else int(operand, 0) & FULL

    for statement in re.findall(r"[^;{}]+", instructions):
        name, _, rest = statement.strip().partition(" ")
        if name in ("", ".reg"):
            continue
        target, *sources = rest.replace(" ", "").split(",")
        first, *others = map(read, sources)
        match name:
            case "shr.b32":
                result = first >> others[0]
            case "shl.b32":
                result = first << others[0]
            case "shr.s32":
                result = (first - ((first >> 31) << 32)) >> others[0]
            case "and.b32":
                result = first & others[0]
            case "lop3.b32":
                assert others[2] == 0xEA
                result = (first & others[0]) | others[1]
            case "prmt.b32":
                pool = (first | (others[0] << 32)).to_bytes(8, "little")
                result = int.from_bytes(bytes(pool[(others[1] >> (4 * byte)) & 7] for byte in range(4)), "little")
            case _:
                raise AssertionError(f"unknown: {name}")
        values[target] = result & FULL
    return [values[f"${index}"] for index in range(num_outputs)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["u4", "e2m1", "u8", "e4m3"])
def test_instructions_make_the_numbers_of_codes(kind: Kind, dtype: torch.dtype) -> None:
    chunks = assembly(kind, dtype)
    assert chunks is not None
    bits = 16 // len(chunks)
    words = torch.randint(0, 2**32, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    for chunk, instructions in enumerate(chunks):
        for word in words:
            codes = [(word >> (16 * half + bits * chunk)) & (2**bits - 1) for half in range(2)]
            if bits == 4:
                (pair,) = evaluate(instructions, word, 1)
                numbers = torch.tensor([pair], dtype=torch.int64).to(torch.int32).view(dtype)
            else:
                numbers = torch.tensor(evaluate(instructions, word, 2), dtype=torch.int64).to(torch.int32)
                numbers = numbers.view(torch.float32)
            if kind in ("u4", "u8"):
                base = 2.0**23 if kind == "u8" else 128 if dtype == torch.bfloat16 else 1024
                expected = torch.tensor([code + base for code in codes])
            else:
                expected = codebook(kind)[codes] / UNITS[kind, numbers.dtype]
            is_number = ~expected.isnan()
            assert torch.equal(numbers.float()[is_number], expected[is_number]), (chunk, hex(word))
