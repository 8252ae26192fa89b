"""The machine code of products with quantized weights on Hopper, compiled without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_quantized_estimates
import pytest
from bench_gpu_parts.quantized import FORMATS, ODD_LOOP_INSTRUCTIONS, QuantizedName
from quantized_launches import EXPERTS

SUPPORT = Path(__file__).parents[1] / "support"
TENSOR_CORES = {"s8": "IGMMA", "f8": "QGMMA"}
ROWS = (16, 8192)


def step_of(name: QuantizedName) -> int:
    """Return the blocks of inputs that an iteration of a tile of 16 rows multiplies."""
    return 1 if FORMATS[name].kind in TENSOR_CORES else 2


PROGRAM = """
import json, sys
sys.path += [sys.argv[1], sys.argv[1] + "/../../scripts"]
from compiled_kernels import compiled
from quantized_launches import EXPERTS, LAUNCHES
found = {}
for name, instruction in json.loads(sys.argv[2]).items():
    (kernel,) = [one for one in compiled(LAUNCHES[name], 90) if one.kernel == "quantized_linear_kernel"]
    loops = kernel.loops(instruction)
    listing, total = kernel.listing(), loops[0].total()
    exit = listing.index("EXIT")  # of programs that are not the last of a tile, if tiles have several
    found[name] = {"loop": loops[0], "total": total, "end": [exit - total, len(listing) - exit]}
for name in EXPERTS:
    all_kernels = compiled(LAUNCHES[f"quantized experts, {name}, 16 tokens"], 90)
    kernels = [one for one in all_kernels if one.kernel.startswith("quantized_")]
    instruction = next(one for one in ("HGMMA", "IGMMA", "QGMMA") if kernels[-1].instructions()[one])
    found[f"experts, {name}"] = [loop for one in kernels[-2:] for loop in one.loops(instruction)]
print(json.dumps(found))
"""


def key(name: QuantizedName, num_rows: int) -> str:
    return f"quantized_linear, {name}, {num_rows} rows"


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """Return instructions of each launch; from a process where nothing is interpreted."""
    wanted = {key(name, rows): TENSOR_CORES.get(form.kind, "HGMMA") for name, form in FORMATS.items() for rows in ROWS}
    command = [sys.executable, "-P", "-c", PROGRAM, str(SUPPORT), json.dumps(wanted)]
    environment = {"TRITON_CACHE_DIR": str(Path.home() / ".cache" / "octavo" / "triton"), **os.environ}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", FORMATS)
def test_estimates_count_the_instructions_of_the_machine_code(compiled: dict[str, Any], name: QuantizedName) -> None:
    counted = tuple(compiled[key(name, rows)]["total"] for rows in ROWS)
    assert (counted[0] / step_of(name), counted[1]) == FORMATS[name].loop_instructions
    few, many = (compiled[key(name, rows)]["end"] for rows in ROWS)
    assert tuple(few) == FORMATS[name].end_instructions
    assert sum(many) <= gpu_quantized_estimates.LARGEST_END_INSTRUCTIONS


def test_the_loops_wait_for_no_copy(compiled: dict[str, Any]) -> None:
    """Codes, scales and rows are copied while a tile before is multiplied."""
    for name, found in compiled.items():
        for loop in found if name.startswith("experts") else [found["loop"]]:
            assert loop["LDGSTS"], name
            assert "LDG" not in loop, name


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_need_about_the_instructions_of_other_products(compiled: dict[str, Any], name: QuantizedName) -> None:
    loops = [sum(loop.values()) for loop in compiled[f"experts, {name}"]]
    assert len(loops) == 3, "gates, ups, downs"
    if name in ODD_LOOP_INSTRUCTIONS:
        assert max(loops) == ODD_LOOP_INSTRUCTIONS[name]
    else:
        assert max(loops) <= 1.1 * step_of(name) * FORMATS[name].loop_instructions[0]
