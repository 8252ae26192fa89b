"""What requests ask for compiles nothing, and the kernels of sampling add up in a fixed order."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"

PROGRAM = """
import json, sys
from collections import defaultdict
sys.path.append(sys.argv[1])
import torch
from compiled_kernels import compiled
from kernel_launches import I64, VOCAB_SIZE, empty, logits
from octavo.kernels.logprobs import gpu as logprobs
from octavo.kernels.logprobs.memory import LogprobsMemory
from octavo.kernels.sample import RequestTable, SamplingWidths
from octavo.kernels.sample import gpu as sample

def run():
    for num_rows, length in ((1, 1), (7, 65), (64, 300)):
        widths = SamplingWidths(length, length, length, 16 * length, -(-VOCAB_SIZE // 32))
        table = RequestTable.allocate(num_rows, widths, torch.device("meta"))
        per_row = empty(num_rows, dtype=I64)
        reports = LogprobsMemory.allocate(num_rows, torch.device("meta"))
        sample.sample_rows(logits(num_rows), table, per_row, per_row, per_row, largest=1e30, logprobs=reports)
        sample.record_tokens(table, per_row, per_row, per_row)
        for num_top in (1, 16, length):
            logprobs.logprobs_of_rows(logits(num_rows), per_row, num_top)
        logprobs.logprobs_of_rows(logits(num_rows), per_row, empty(num_rows, length, dtype=I64))

found = defaultdict(list)
for kernel in compiled(run, 90):
    found[kernel.kernel].append(kernel.instructions())
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def variants() -> dict[str, list[dict[str, int]]]:
    """Return the instructions of every variant of every kernel; from a process where nothing is interpreted."""
    command = [sys.executable, "-P", "-c", PROGRAM, str(SUPPORT)]
    environment = {"TRITON_CACHE_DIR": str(Path.home() / ".cache" / "octavo" / "triton"), **os.environ}
    environment["PYTHONPATH"] = str(SUPPORT.parents[1] / "scripts")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_numbers_and_lists_of_requests_do_not_compile_kernels_again(variants: dict[str, list[dict[str, int]]]) -> None:
    assert {name: len(found) for name, found in variants.items()} == {
        "scan_kernel": 1,
        "begin_kernel": 1,
        "narrow_kernel": 2,  # the first round and the others
        "collect_kernel": 2,  # with and without a draw
        "select_kernel": 1,
        "draw_kernel": 1,
        "list_kernel": 1,
        "record_kernel": 1,
        "report_part_kernel": 1,
        "report_row_kernel": 1,
    }


def test_sums_do_not_depend_on_the_order_of_programs(variants: dict[str, list[dict[str, int]]]) -> None:
    """Atomic additions of floats would add up in the order in which programs run."""
    names = {name for found in variants.values() for instructions in found for name in instructions}
    assert "SHFL" in names
    assert not {name for name in names if name.startswith(("ATOM", "RED"))} - {"REDUX"}
