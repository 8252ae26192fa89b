"""The instructions that make numbers of codes on a GPU, which Triton's interpreter cannot run: evaluated here."""

import re

import pytest
import torch

from octavo.kernels.linear.codebooks import codebook
from octavo.kernels.linear.gpu_quantized_layout import TILE_OUTPUTS, Kind, _words, assembly, chunks_of, pieces_of

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
            case "shf.l.wrap.b32":
                assert others[0] == first
                result = (first << others[1]) | (first >> 32 - others[1])
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


def codes_of(weights: torch.Tensor, kind: Kind, dtype: torch.dtype, chunk: int, num_chunks: int) -> torch.Tensor:
    """Return packed words, two of them in one of 32 bits."""
    words = _words(weights, kind, dtype, TILE_OUTPUTS, weights.shape[1], chunk, num_chunks)
    return words.view(torch.int32).flatten().to(torch.int64) & FULL


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("kind", "group_size"), [("u4", 32), ("e2m1", 32), ("u8", 32), ("u8", 0), ("e4m3", 32)])
def test_instructions_make_the_numbers_of_codes(kind: Kind, group_size: int, dtype: torch.dtype) -> None:
    chunks = assembly(kind, dtype, group_size)
    assert chunks is not None
    chunk, num_chunks = chunks_of(kind, group_size)
    bits = 16 // num_chunks
    shape = TILE_OUTPUTS, chunk * num_chunks
    codes_OI = torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    pairs_by_chunk = codes_OI.view(TILE_OUTPUTS, num_chunks, chunk // 2, 2).permute(1, 0, 2, 3).flatten(1, 2)
    words = codes_of(codes_OI, kind, dtype, chunk, num_chunks).tolist()
    are_halves = bool(pieces_of(kind, dtype, group_size))
    for index, (instructions, pairs) in enumerate(zip(chunks, pairs_by_chunk.tolist(), strict=True)):
        for word, codes in list(zip(words, pairs, strict=True))[::37]:
            numbers = torch.tensor(evaluate(instructions, word, 1 if are_halves else 2), dtype=torch.int64)
            numbers = numbers.to(torch.int32).view(dtype if are_halves else torch.float32).float()
            if kind in ("u4", "u8"):
                expected = torch.tensor([float(code) for code in codes])
                if not are_halves:
                    expected += 2.0**23
                elif dtype == torch.float16:
                    expected += 1024
                else:  # the upper halves of bytes count 16 times
                    expected *= 2.0**-133 * (16 if kind == "u4" and index % 2 else 1)
            else:
                expected = codebook(kind)[codes] / UNITS[kind, dtype if are_halves else torch.float32]
            is_number = ~expected.isnan()
            assert torch.equal(numbers[is_number], expected[is_number]), (index, hex(word))
