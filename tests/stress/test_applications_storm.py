"""Several applications load one engine with a tiny cache; every answer has the bits of the request alone."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from specs import PYTHONPATH
from storm_client import digest, storm_requests
from tiny_models import make_tiny
from workloads import Ask, ask

from octavo.core_proc.recorder import read_recording, replay
from octavo.frontend.client import AsyncClient
from octavo.protocol.stats import EngineStats

NUM_APPLICATIONS = 3


async def run_storm(model: Path, recording: Path, num_rounds: int) -> tuple[list[tuple[int, str]], EngineStats]:
    """Return all results, and the engine's counters afterwards."""
    async with AsyncClient.launch(
        str(model),
        max_model_len=256,
        max_num_seqs=10,
        num_gpu_blocks_override=20,  # few, so that it preempts whenever two run at once
        max_num_batched_tokens=40,
        record_steps=str(recording),
    ) as client:
        applications = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "storm_client", client.address, str(seed), str(num_rounds)),
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": PYTHONPATH},
            )
            for seed in range(NUM_APPLICATIONS)
        ]
        results = []
        for application in applications:
            output, _ = await application.communicate()
            assert application.returncode == 0
            results += [(number, answer) for number, answer in json.loads(output)]
        return results, await client.engine_stats()


async def run_alone(model: Path) -> list[str]:
    """Return what every request gives by itself, in the simplest engine."""
    simplest = {"max_num_seqs": 1, "async_scheduling": False, "enable_prefix_caching": False}
    async with AsyncClient.launch(str(model), max_model_len=256, **simplest) as client:
        return [digest(await ask(client, Ask(request.prompt, request.params))) for request in storm_requests()]


@pytest.mark.parametrize("num_rounds", [1, pytest.param(30, marks=pytest.mark.long)])
def test_a_storm_of_applications(tmp_path: Path, num_rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CHECK", "1")
    model = make_tiny("LlamaForCausalLM", tmp_path / "model")
    results, stats = asyncio.run(run_storm(model, tmp_path / "recording", num_rounds))
    expected = asyncio.run(run_alone(model))
    assert len(results) > 15 * num_rounds * NUM_APPLICATIONS
    changed = sorted({number for number, answer in results if answer != expected[number]})
    assert not changed, f"these requests changed in the storm: {changed}"
    assert stats.num_preemptions > 0, "this storm is meant to preempt"
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)
    again = replay(read_recording(tmp_path / "recording"))
    assert again.is_identical
    assert 0 < again.num_plans <= stats.num_steps, "a plan may have several steps"
