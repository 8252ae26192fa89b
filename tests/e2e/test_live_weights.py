"""Weights that change while an engine serves: LLM, over real processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trainer
from peft_adapters import write_adapter
from safetensors.torch import load_file, save_file
from tiny_heads import make_head
from waiting import wait_until

from octavo import LLM, LoRARequest, SamplingParams
from octavo.protocol.errors import InvalidRequestError, OctavoError

PROMPTS = ["the quick brown fox", "one request, one batch, one block", "and then the dog tells"]
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True, logprobs=1)
SETTINGS = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}


def changed(model: Path, folder: Path, factor: float = 1.5) -> Path:
    """Write a checkpoint for the same model with other weights."""
    folder.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(model / "model.safetensors")
    save_file({name: (tensor * factor).contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return changed(model, tmp_path_factory.mktemp("other") / "model")


def bits(llm: LLM, adapters: list[LoRARequest | None] | None = None) -> list[tuple]:
    """Return tokens and logprobs of some requests."""
    outputs = llm.generate(PROMPTS, PARAMS, lora_request=adapters, use_tqdm=False)
    return [(output.token_ids, output.cumulative_logprob) for (output,) in [one.outputs for one in outputs]]


@pytest.fixture(scope="module")
def expected(model: Path, other: Path) -> tuple[list, list]:
    """Return the bits of engines that were started with the old weights, and with the new ones."""
    with LLM(str(model), **SETTINGS) as before, LLM(str(other), **SETTINGS) as after:
        return bits(before), bits(after)


def test_updates_leave_the_bits_of_a_fresh_engine(model, other, expected, tmp_path):
    with LLM(str(model), **SETTINGS) as llm:
        identity = llm.client.facts.identity
        assert bits(llm) == expected[0]
        assert llm.update_weights(str(other), label="other") == 1
        assert bits(llm) == expected[1]
        (status,) = llm.weights_status().values()
        assert (status.version, status.label) == (1, "other")
        assert llm.client.facts.identity != identity
        (output,) = llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)
        assert output.outputs[0].weight_versions == [(0, 24, 1)]
        assert llm.update_weights(load_file(model / "model.safetensors")) == 2
        assert bits(llm) == expected[0]
        with pytest.raises(InvalidRequestError, match="lacks"):
            llm.update_weights({"model.norm.weight": load_file(model / "model.safetensors")["model.norm.weight"]})
        integers = {name: tensor.int() for name, tensor in load_file(other / "model.safetensors").items()}
        with pytest.raises(InvalidRequestError, match="has type int32 in the checkpoint"):
            llm.update_weights(integers)
        with pytest.raises(InvalidRequestError, match="no checkpoint in"):
            llm.update_weights(tmp_path / "absent")
        assert bits(llm) == expected[0]


def test_adapters_in_slots_are_added_to_the_new_weights(model, other, tmp_path):
    write_adapter(model, tmp_path / "adapter")
    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    adapters = [adapter, None, adapter]
    settings = {**SETTINGS, "enable_lora": True, "max_loras": 1}
    with LLM(str(other), **settings) as fresh:
        expected = bits(fresh, adapters)
    with LLM(str(model), **settings) as llm:
        before = bits(llm, adapters)
        llm.update_weights(str(other))
        assert bits(llm, adapters) == expected
        llm.update_weights(load_file(model / "model.safetensors"))
        assert bits(llm, adapters) == before


def test_a_head_stays_when_weights_are_dropped_and_updated(model, other, expected, tmp_path):
    head = make_head("eagle", tmp_path / "head")
    speculation = {"method": "eagle", "model": str(head), "num_speculative_tokens": 3, "adaptive": False}
    with LLM(str(model), **SETTINGS, speculative_config=speculation) as llm:
        assert bits(llm) == expected[0]
        llm.sleep(2)
        llm.wake_up()
        llm.update_weights(str(other))
        assert bits(llm) == expected[1]
        llm.update_weights(load_file(model / "model.safetensors"))
        assert bits(llm) == expected[0]
        assert llm.stats().spec_decode_num_draft_tokens > 0


def start_trainer(llm: LLM, weights: Path, mode: str, timeout_s: float = 180) -> subprocess.Popen:
    addresses = ",".join(engine.link.address for engine in llm.client.engines)
    words = [addresses, str(weights / "model.safetensors"), mode, str(timeout_s)]
    return subprocess.Popen([sys.executable, "-P", trainer.__file__, *words], stdout=subprocess.PIPE, text=True)


def train(llm: LLM, weights: Path, mode: str = "whole") -> str:
    """Return what a trainer says that broadcasts weights."""
    with start_trainer(llm, weights, mode) as process:
        return process.communicate(timeout=240)[0]


@pytest.mark.parametrize(
    "parallel", [{"tensor_parallel_size": 2}, pytest.param({"data_parallel_size": 2}, marks=pytest.mark.long)], ids=str
)
def test_a_trainer_broadcasts_its_weights(model, other, expected, parallel):
    settings = {**SETTINGS, **parallel, "num_threads": 1, "kv_cache_memory_bytes": 16 << 20}
    with LLM(str(model), **settings) as llm:
        assert train(llm, other) == "version 1\nversion 2\n"
        assert bits(llm) == expected[1]
        assert "has shape (2,)" in train(llm, other, "shape")
        assert bits(llm) == expected[1]
        assert {status.version for status in llm.weights_status().values()} == {2}
        train(llm, model, "dies")
        wait_until(lambda: all(status.fault for status in llm.weights_status().values()))
        with pytest.raises(OctavoError, match=r"all of them must be updated again.*did not send"):
            bits(llm)
        assert train(llm, model) == "version 3\nversion 4\n"
        assert bits(llm) == expected[0]


def test_a_caller_that_dies_in_an_update_of_several_engines_leaves_them_serving(model, other, expected):
    settings = {**SETTINGS, "data_parallel_size": 2, "num_threads": 1, "kv_cache_memory_bytes": 16 << 20}
    with LLM(str(model), **settings) as llm:
        with start_trainer(llm, other, "holds") as caller:
            assert caller.stdout is not None and caller.stdout.readline() == "held\n"
            caller.kill()
        assert bits(llm) == expected[0]
        tensors = {**load_file(other / "model.safetensors"), "lm_head.weight": torch.ones(2)}
        with pytest.raises(InvalidRequestError, match=r"engine 0: .*has shape.*; engine 1: .*; no engine has changed"):
            llm.update_weights(tensors)
        assert bits(llm) == expected[0]
        assert llm.update_weights(str(other)) == 1
        assert bits(llm) == expected[1]


@pytest.mark.long
def test_a_silent_trainer_is_given_up(model, other, expected):
    with LLM(str(model), **SETTINGS) as llm, start_trainer(llm, other, "silent", timeout_s=5) as process:
        wait_until(lambda: llm.weights_status()[0].fault)
        process.kill()
        llm.update_weights(str(other))
        assert bits(llm) == expected[1]


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.long), 2])
def test_sleep_frees_memory_and_requests_wait(model, expected, level):
    with LLM(str(model), **SETTINGS) as llm:
        llm.sleep(level)
        assert llm.is_sleeping() and llm.is_paused()
        if level == 2:
            llm.wake_up(["weights"])
            llm.update_weights(str(model))
        llm.wake_up()
        assert not llm.is_sleeping() and not llm.is_paused()
        assert bits(llm) == expected[0]
