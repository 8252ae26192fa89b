"""The machine code of GPU kernels where speed or bits depend on it, compiled without a GPU."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import gpu_attention_estimates
import gpu_decode_estimates
import gpu_estimates
import gpu_expert_estimates
import gpu_latent_estimates
import gpu_state_estimates
import gpu_tower_estimates
import pytest

SUPPORT = Path(__file__).parents[1] / "support"

TENSOR_CORES = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
"""The instruction of products, by architecture; the default run compiles them for Hopper."""
ARCHITECTURES = [pytest.param(number, marks=() if number == 90 else pytest.mark.long) for number in TENSOR_CORES]

EXPERT_PRODUCTS = {"gate_up_kernel": 8, "down_kernel": 4}
"""The instructions of products for a block of 64 inputs."""

PROGRAM = """
import json, sys
sys.path += [sys.argv[1], sys.argv[1] + "/../../scripts"]
from compiled_kernels import compiled
from kernel_launches import EARLY, LAUNCHES, AttentionShape, torch
from octavo.kernels.paged_attention.gpu_tiling import Tiling, chunk_rows
attention = [name for name in LAUNCHES if name.startswith("paged_attention, heads of")]
products = [name for name in LAUNCHES if name.startswith("linear") and "float32" not in name and "early" not in name]
found = {"attention": {}, "loops": {}}
for name in attention:
    kernels = compiled(LAUNCHES[name], 90)
    found["attention"][name] = [kernel.instructions() for kernel in kernels]
    found["loops"][name] = [kernel.loop("HGMMA") for kernel in kernels]
    if name.endswith("of 128"):
        found["split"] = [loop.total() for loop in kernels[0].loops("HGMMA")]
        found["chunk"] = [loop.total() for loop in kernels[1].loops("HGMMA")]
tiling = Tiling.of(AttentionShape(32, 8, 128, 0.1), torch.bfloat16, torch.bfloat16, 90)
found["tile"] = [chunk_rows(AttentionShape(32, 8, 128, 0.1)), tiling.tile]
for architecture, instruction in json.loads(sys.argv[2]).items():
    kernels = {name: compiled(LAUNCHES[name], int(architecture))[0] for name in products}
    found[architecture] = {name: (one.instructions(), one.loop(instruction)) for name, one in kernels.items()}
    if architecture == "90":
        persistent = {name: one for name, one in kernels.items() if one.kernel == "linear_kernel"}
        ends = {name: one.loop("STG") - one.loop(instruction) for name, one in persistent.items()}
        found["ends"] = {name: end.total() for name, end in ends.items()}
names = [name for name in LAUNCHES if name.startswith("experts") and "adapters" not in name]
products_of_experts = [one for name in names for one in compiled(LAUNCHES[name], 90) if one.kernel in sys.argv[3:]]
recurrences = {"scan": "selective_scan, Mamba-2", "delta": "gated_delta_rule, Qwen3-Next"}
found["recurrences"] = {name: compiled(LAUNCHES[one], 90)[0].loop("MUFU") for name, one in recurrences.items()}
found["convolution"] = compiled(LAUNCHES["causal_conv1d, Mamba-2"], 90)[0].instructions().total()
found["experts"] = [(one.kernel, one.instructions(), one.loop("HGMMA")) for one in products_of_experts]
names = [name for name in LAUNCHES if name.startswith("paged_attention, latent")]
found["latent"] = [loop for name in names for one in compiled(LAUNCHES[name], 90) for loop in one.loops("HGMMA")]
towers = {64: "CLIP", 80: "Qwen2-VL", 128: "heads of 128"}
kernels = {dim: compiled(LAUNCHES[f"varlen_attention, {name}"], 90)[0] for dim, name in towers.items()}
found["towers"] = {dim: kernel.loop("HGMMA").total() for dim, kernel in kernels.items()}
for group, names in (("early", [f"{name}, early" for name in EARLY]), ("usual", EARLY)):
    found[group] = {one.kernel: one.listing() for name in names for one in compiled(LAUNCHES[name], 90)}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return instructions and their numbers; from a process where nothing is interpreted."""
    products = TENSOR_CORES if request.config.getoption("--long") else {90: TENSOR_CORES[90]}
    command = [sys.executable, "-P", "-c", PROGRAM, str(SUPPORT), json.dumps(products), *EXPERT_PRODUCTS]
    environment = {"TRITON_CACHE_DIR": str(Path.home() / ".cache" / "octavo" / "triton"), **os.environ}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def instructions(compiled: dict[str, Any]) -> dict[str, list[Counter[str]]]:
    """Return the instructions of attention on Hopper."""
    return {name: [Counter(one) for one in kernels] for name, kernels in compiled["attention"].items()}


def products_of(compiled: dict[str, Any], architecture: int) -> dict[str, tuple[Counter[str], Counter[str]]]:
    """Return the instructions of each product: of the whole kernel, and of its innermost loop."""
    products = compiled[str(architecture)]
    return {name: (Counter(whole), Counter(loop)) for name, (whole, loop) in products.items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_products_of_all_sizes_multiply_with_one_instruction(compiled: dict[str, Any], architecture: int) -> None:
    """Two instructions might round in two ways, and then a row's bits would depend on how many there are."""
    products = products_of(compiled, architecture)
    assert len(products) == 14
    for name, (whole, loop) in products.items():
        assert {one for one in TENSOR_CORES.values() if whole[one]} == {TENSOR_CORES[architecture]}, name
        copies = "LDGSTS" if architecture == 80 else "UTMALDG"
        assert loop[copies] > 0, f"{name}: no copies that run while products are computed"


def test_products_do_not_wait_for_one_another_on_hopper(compiled: dict[str, Any]) -> None:
    """ptxas inserts waits if it cannot prove that only `wgmma` sets the sums; a loop needs an arrival and a wait."""
    for name, (_, loop) in products_of(compiled, 90).items():
        assert loop["HGMMA"] == 4, name
        assert loop["WARPGROUP"] == 2, name


def test_the_products_of_experts_multiply_with_one_instruction_and_copy_meanwhile(compiled: dict[str, Any]) -> None:
    """Copies of 16 bytes need addresses that the compiler knows to be aligned; it forgets that of a loaded number."""
    assert len(compiled["experts"]) == 6
    for kernel, whole, loop in compiled["experts"]:
        assert (loop["HGMMA"], whole.get("HMMA", 0)) == (EXPERT_PRODUCTS[kernel], 0)
        assert 0 < loop["LDGSTS"] <= 12 and "LDG" not in loop, kernel
        assert loop["WARPGROUP"] <= 3, "an arrival of each product, and a wait"
    loops = [sum(loop.values()) for _, _, loop in compiled["experts"]]
    assert max(loops) == gpu_expert_estimates.LOOP_INSTRUCTIONS


def test_estimates_count_the_instructions_of_the_machine_code(compiled: dict[str, Any]) -> None:
    loops = [loop.total() for _, loop in products_of(compiled, 90).values()]
    assert max(loops) == gpu_estimates.LOOP_INSTRUCTIONS
    ends = compiled["ends"]
    assert max(ends[name] for name in ends if "silu" not in name) == gpu_estimates.TILE_INSTRUCTIONS
    assert max(ends[name] for name in ends if "silu" in name) == gpu_estimates.GATED_TILE_INSTRUCTIONS


def test_recurrences_take_the_instructions_of_their_estimates_and_read_ahead(compiled: dict[str, Any]) -> None:
    loops = compiled["recurrences"]
    found = sum(loops["scan"].values()), sum(loops["delta"].values())
    assert found == (gpu_state_estimates.SCAN_INSTRUCTIONS, gpu_state_estimates.DELTA_INSTRUCTIONS)
    assert compiled["convolution"] == gpu_state_estimates.CONV_INSTRUCTIONS
    for loop in loops.values():
        assert loop["LDG"] >= 4, "the rows of the next token"


def test_estimates_of_attention_are_for_the_kernel_that_is_compiled(compiled: dict[str, Any]) -> None:
    of = gpu_attention_estimates
    decode = gpu_decode_estimates
    assert (min(compiled["split"]), max(compiled["split"])) == (decode.SHARED_INSTRUCTIONS, decode.OWN_INSTRUCTIONS)
    assert compiled["tile"] == [of.ROWS, of.KEYS]
    assert compiled["chunk"] == [of.WHOLE_INSTRUCTIONS, of.EDGE_INSTRUCTIONS]
    assert compiled["loops"]["paged_attention, heads of 128"][1]["BAR"] == 2, "warps wait for all others twice a tile"


def test_estimates_of_towers_count_the_instructions_of_the_machine_code(compiled: dict[str, Any]) -> None:
    assert {int(dim): total for dim, total in compiled["towers"].items()} == gpu_tower_estimates.INSTRUCTIONS


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_decodes_and_prompts_multiply_with_one_instruction(
    instructions: dict[str, list[Counter[str]]], head_dim: int
) -> None:
    """The other one takes the sums of weights alone, in all loops: 4 times 16 keys, of 8 or 16 queries of a warp."""
    kernels = instructions[f"paged_attention, heads of {head_dim}"]
    assert [found["HMMA"] for found in kernels] == [8 + 8 + 4, 4 + 4]
    for found in kernels:
        assert found["HGMMA"] > 0
        assert found["LDGSTS"] > 0, "no copies that run while products are computed"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_products_of_attention_do_not_wait_for_one_another(
    instructions: dict[str, list[Counter[str]]], head_dim: int
) -> None:
    """A tile of keys needs an arrival and a wait for each of its two products, in each of 3 and 2 loops."""
    kernels = instructions[f"paged_attention, heads of {head_dim}"]
    assert [found["WARPGROUP"] for found in kernels] == [3 * 4, 2 * 4]


def test_loops_of_latent_attention_copy_meanwhile_and_spill_nothing(compiled: dict[str, Any]) -> None:
    """Shared segments, those of a request, and prompts."""
    loops = [Counter(loop) for loop in compiled["latent"]]
    assert len(loops) == 3 + 2
    for loop in loops:
        assert loop["HGMMA"] == gpu_latent_estimates.PRODUCTS
        assert loop["LDGSTS"] == 18, "copies that run while products are computed: a tile once"
        assert "LDL" not in loop and "STL" not in loop
    assert max(loop.total() for loop in loops) == gpu_latent_estimates.INSTRUCTIONS


def test_kernels_that_begin_early_read_only_weights_before_they_wait(compiled: dict[str, Any]) -> None:
    """`ACQBULK` waits for the kernel ahead, `PREEXIT` lets the next one begin, and `CCTL` prefetches weights."""
    memory = ("LDG", "LDGSTS", "UTMALDG", "UBLKCP", "LD", "STG", "ST", "UTMASTG", "ATOM", "ATOMG", "RED")
    for name, listing in compiled["early"].items():
        assert listing.count("ACQBULK") == listing.count("PREEXIT") == 1, name
        before = listing[: listing.index("ACQBULK")]
        assert "PREEXIT" in before, name
        assert not {*memory} & {*before}, name
        assert ("CCTL" in before) == ("linear" in name), name
    for name, listing in compiled["usual"].items():
        assert not {"ACQBULK", "PREEXIT"} & {*listing}, name
