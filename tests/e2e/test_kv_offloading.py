"""Blocks in host memory and in files, in whole engines: the same bits as without, on each kind of worker group."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from connector_fakes import documented_connector
from servers import of_module
from waiting import wait_until

from octavo import LLM, SamplingParams
from octavo.protocol.block_packs import list_packs, read_header_of

NUM_CONVERSATIONS, NUM_TURNS = 4, 3
SETTINGS: dict[str, Any] = {"max_model_len": 192, "num_gpu_blocks_override": 14, "max_num_seqs": 2}
COPIES: dict[str, Any] = {"kv_offloading_recompute": False}
"""Times decide nothing: a tiny model may compute faster than files are read."""


def converse(llm: LLM) -> tuple[list[list[int]], int]:
    """Have conversations take turns, each of which fills half of the cache; returns all tokens, and how many were
    cached."""
    num_cached = 0
    talks = [[number + 1] * 70 for number in range(NUM_CONVERSATIONS)]
    for turn in range(NUM_TURNS):
        for number, talk in enumerate(talks):
            params = SamplingParams(max_tokens=20, seed=turn, temperature=1.0, ignore_eos=True)
            (output,) = llm.generate([{"prompt_token_ids": talk}], params, use_tqdm=False)
            num_cached += output.num_cached_tokens or 0
            talk += [*output.outputs[0].token_ids, number]
    return talks, num_cached


def num_written(folder: Path) -> int:
    """Return how many blocks both ranks have in files, or the only one."""
    ranks = [rank for rank in folder.glob("*/*/*") if rank.is_dir()]
    keys = [{key for _, path in list_packs(rank) for key in read_header_of(path).keys} for rank in ranks]
    return len(set.intersection(*keys)) if keys else 0


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"dtype": "float32"}, id="float32"),
        pytest.param({"dtype": "bfloat16", "kv_cache_dtype": "int8", "tensor_parallel_size": 2}, id="int8, two ranks"),
        pytest.param({"dtype": "bfloat16", "pipeline_parallel_size": 2}, id="two stages", marks=pytest.mark.long),
        pytest.param({"dtype": "float32", "cpu_kernels": "torch"}, id="torch", marks=pytest.mark.long),
        pytest.param({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, id="fp8", marks=pytest.mark.long),
    ],
)
def test_conversations_continue_from_host_memory(model: Path, settings: dict[str, Any]) -> None:
    with LLM(str(model), **SETTINGS, **settings) as llm:
        expected, num_cached = converse(llm)
    with LLM(str(model), **SETTINGS, **settings, **COPIES, kv_offloading_size=0.01) as llm:
        talks, num_found = converse(llm)
    assert talks == expected
    assert num_found >= NUM_CONVERSATIONS * (64 + 80) > num_cached


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"dtype": "bfloat16", "kv_cache_dtype": "int8", "tensor_parallel_size": 2}, id="int8, two ranks"),
        pytest.param({"dtype": "float32", "kv_offloading_size": 0.01}, id="and host memory", marks=pytest.mark.long),
        pytest.param({"dtype": "bfloat16", "pipeline_parallel_size": 2}, id="two stages", marks=pytest.mark.long),
    ],
)
def test_conversations_continue_from_files(
    model: Path, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CHECK", "1")
    with LLM(str(model), **SETTINGS, **settings) as llm:
        expected, _ = converse(llm)
    most = NUM_CONVERSATIONS * (64 + 80)
    with LLM(str(model), **SETTINGS, **settings, **COPIES, kv_offloading_path=str(tmp_path)) as llm:
        talks, _ = converse(llm)
        assert talks == expected
        wait_until(lambda: num_written(tmp_path) == NUM_CONVERSATIONS * 8, lambda: num_written(tmp_path))
        for pid in of_module(os.getpid(), "octavo.worker_proc"):
            os.kill(pid, signal.SIGKILL)
        talks, num_found = converse(llm)
        assert talks == expected
        assert num_found >= most
    files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    for path in files[::3]:
        os.truncate(path, path.stat().st_size // 2)
    with LLM(str(model), **SETTINGS, **settings, **COPIES, kv_offloading_path=str(tmp_path)) as llm:
        talks, num_found = converse(llm)
    assert talks == expected
    assert num_found


def test_conversations_continue_from_a_connector(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of the documentation, on two ranks, over a restart."""
    monkeypatch.setenv("OCTAVO_CHECK", "1")
    connector = documented_connector(tmp_path)
    settings = SETTINGS | {"dtype": "float32", "tensor_parallel_size": 2}
    with LLM(str(model), **settings, **COPIES, kv_transfer_config=connector) as llm:
        expected, _ = converse(llm)
    files = sorted(path for path in (tmp_path / "blocks").rglob("*") if path.is_file())
    assert {path.name.rpartition("-")[2] for path in files} == {"0", "1"}
    with LLM(str(model), **settings, **COPIES, kv_transfer_config=connector | {"kv_role": "kv_consumer"}) as llm:
        talks, num_found = converse(llm)
    assert talks == expected
    assert num_found >= NUM_CONVERSATIONS * (64 + 64 + 80)
