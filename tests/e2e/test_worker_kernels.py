"""Which kernels a worker opens, and what it logs if they are not the expected ones."""

import dataclasses
import logging
from pathlib import Path

import msgspec
import pytest
from tiny_models import make_tiny
from worker_plans import Driver, loaded, spec, worker_config

from octavo.kernels.native.build import silent
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.kernels import open_kernels


@pytest.fixture(autouse=True)
def every_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def wide_heads(directory: Path, cpu_kernels: str) -> ResolvedConfig:
    model = make_tiny("LlamaForCausalLM", directory, head_dim=592, num_attention_heads=2, num_key_value_heads=1)
    return worker_config(model, cpu_kernels=cpu_kernels)


def test_heads_too_wide_for_native_kernels_are_computed_by_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = wide_heads(tmp_path, "auto")
    assert open_kernels(config, Env.read(), silent) is None
    assert "WARNING" in caplog.text and "heads of 592 dimensions" in caplog.text
    driver = Driver(loaded(config, is_native=False), config)
    request = driver.admit(0, [3, 5, 7], spec())
    driver.step({0: 3})
    assert len(request.outputs) == 1


def test_heads_too_wide_for_native_kernels_that_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--cpu-kernels native: attention heads of 592 dimensions") as caught:
        open_kernels(wide_heads(tmp_path, "native"), Env.read(), silent)
    assert "--cpu-kernels auto" in caught.value.hint


def test_a_machine_of_several_does_not_fall_back_to_torch(tmp_path: Path) -> None:
    """Another one may have a compiler: both would wait for rows that the other never sends."""
    config = worker_config(make_tiny("LlamaForCausalLM", tmp_path / "model"), cpu_kernels="auto")
    env = dataclasses.replace(Env.read(), cxx="no-such-compiler", cache_dir=tmp_path)
    assert open_kernels(config, env, silent) is None
    with pytest.raises(ConfigError, match="--cpu-kernels auto: ") as caught:
        open_kernels(config, env, silent, has_other_nodes=True)
    assert "--cpu-kernels torch to all nodes" in caught.value.hint


def test_torch_is_named_in_the_log_and_binds_no_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_tiny("LlamaForCausalLM", tmp_path)
    config = worker_config(model, cpu_kernels="torch", cpu_binding="compact")
    assert open_kernels(config, Env.read(), silent) is None
    assert "computing with torch's operations" in caplog.text
    assert "--cpu-binding has no effect" in caplog.text


NUM_WORKERS = 4096
"""More than any machine has cores."""


@pytest.mark.parametrize(
    ("changes", "number"),
    [({"world_size": NUM_WORKERS}, 0), ({"data_parallel_size": NUM_WORKERS}, 0), ({}, NUM_WORKERS - 1)],
)
def test_workers_that_find_no_cores_are_not_left_unbound(tmp_path: Path, changes: dict[str, int], number: int) -> None:
    config = worker_config(make_tiny("LlamaForCausalLM", tmp_path), cpu_binding="compact", num_threads=1)
    with pytest.raises(ConfigError, match="compact: 4096 workers with 1 threads each need 4096 cores"):
        open_kernels(msgspec.structs.replace(config, **changes), Env.read(), silent, number=number)
