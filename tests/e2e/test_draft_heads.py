"""Heads that draft: the formulas as published, and the same tokens and bits as without them."""

import random
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_engine import Result, SmallEngine, TimedRequest
from tiny_heads import AUX_LAYERS, depend_on_the_last_token, head_rows, make_head, make_mtp
from tiny_models import VOCAB_SIZE, make_tiny
from transformers import AutoModelForCausalLM
from worker_plans import NUM_BLOCKS, Driver, HostExecutor, loaded, spec, worker_config

from octavo.protocol.errors import ConfigError
from octavo.protocol.params import SamplingSpec
from octavo.protocol.worker_commands import LoadWeights
from octavo.worker_proc.live_model import LiveModel
from octavo.worker_proc.models.heads.base import DraftHead
from octavo.worker_proc.weights import update
from octavo.worker_proc.weights.transfer import WeightReceiver

NUM_DRAFTS = 3
MTP = {"method": "mtp", "num_speculative_tokens": NUM_DRAFTS, "adaptive": False}
EAGLE3_LAYERS = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("model"), num_hidden_layers=EAGLE3_LAYERS)


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def head(method: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_head(method, tmp_path_factory.mktemp("head") / method)


def speculating(method: str, head: Path, **changes: Any) -> dict[str, Any]:
    return {"method": method, "model": str(head), "num_speculative_tokens": NUM_DRAFTS, "adaptive": False, **changes}


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB_SIZE), k=length)


Rows = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@torch.inference_mode()
def expected_drafts(target: Path, head: Path | Rows, token_ids: list[int]) -> tuple[torch.Tensor, list[int]]:
    """The logits of the head after each known token but the last, by the published formulas, and greedy drafts."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    states = model(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
    weights = load_file(head / "model.safetensors") if isinstance(head, Path) else {}
    rows: Rows = partial(head_rows, weights) if isinstance(head, Path) else head
    if "d2t" in weights:
        aux_TX = torch.cat([states[layer][0] for layer in AUX_LAYERS], dim=1)
        features_TD = aux_TX @ weights["fc.weight"].T
    else:
        features_TD = states[-1][0]  # after the final norm
    known, drafts, all_logits = token_ids[1:], [], []
    for _ in range(NUM_DRAFTS):
        hidden_TD, own_TD = rows(model.model.embed_tokens(torch.tensor(known)), features_TD)
        if "d2t" in weights:
            logits_TV = torch.full((len(known), VOCAB_SIZE), -torch.inf)
            places_V = torch.arange(len(weights["d2t"])) + weights["d2t"]
            logits_TV[:, places_V] = hidden_TD @ weights["lm_head.weight"].T
        else:
            logits_TV = model.lm_head(hidden_TD)
        all_logits.append(logits_TV)
        drafts.append(int(logits_TV[-1].argmax()))
        known, features_TD = [*known, drafts[-1]], torch.cat([features_TD, own_TD[-1:]])
    return all_logits[0], drafts


def check_formula(target: Path, head: Path | Rows, speculative_config: dict[str, Any], kernels: str) -> None:
    """Compare logits after a prompt, and drafts after chunks, verified drafts and decodes."""
    config = worker_config(target, max_num_seqs=4, cpu_kernels=kernels, speculative_config=speculative_config)
    model = loaded(config, is_native=kernels == "native")
    executor = HostExecutor(model, config, NUM_BLOCKS)
    driver, drafter = Driver(model, config, executor), executor.pipelined.drafter
    assert drafter is not None and isinstance(model.head, DraftHead)
    request = driver.admit(0, prompt(21), spec())
    assert not driver.step().drafts
    logits_TV, _ = expected_drafts(target, head, request.token_ids)
    got_TV = drafter.rounds.forward.logits(np.arange(21))
    places_V = model.head.token_ids_V
    torch.testing.assert_close(got_TV, logits_TV if places_V is None else logits_TV[:, places_V], rtol=0, atol=1e-4)
    # A second prompt in two chunks, and a step that verifies wrong drafts beside it.
    other = driver.admit(1, prompt(30, seed=1), spec())
    driver.step(chunks={1: 17}, num_drafts=1)
    result = driver.step(num_drafts=NUM_DRAFTS, draft_tokens={0: [5, 6]})
    for running, (slot, token_ids) in zip([request, other], result.drafts, strict=True):
        _, drafts = expected_drafts(target, head, running.token_ids)
        assert (slot, list(token_ids)) == (running.slot, drafts)


@pytest.mark.parametrize("kernels", ["native", pytest.param("torch", marks=pytest.mark.long)])
@pytest.mark.parametrize("arch", ["DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"])
def test_layers_for_multi_token_prediction(tmp_path: Path, arch: str, kernels: str) -> None:
    target, layer = make_mtp(arch, tmp_path, num_layers=2)
    check_formula(target, layer.rows, MTP, kernels)
    requests = storm(5, 6)
    expected, _ = results_of(target, requests, 100, cpu_kernels=kernels)
    got, stats = results_of(target, requests, 40, cpu_kernels=kernels, speculative_config=MTP)
    assert got == expected
    assert stats.spec_decode_num_draft_tokens > 0


def addresses(head: Any) -> list[int]:
    """Return where the plain tensors of a head are, and those of its products."""
    found = [*head.parameters.tensors.values()]
    for packed in head.parameters.packed.values():
        found += packed.product.packed.to_buffers()[1].values()
    return [tensor.data_ptr() for tensor in found]


def check_update(target: Path, other: Path, head: Path | Rows, speculative_config: dict[str, Any]) -> None:
    """Compare drafts after the weights were updated, first as on a GPU, and after they were dropped and updated."""
    config = worker_config(target, max_num_seqs=4, speculative_config=speculative_config)
    model = loaded(config)
    executor = HostExecutor(model, config, NUM_BLOCKS)
    driver = Driver(model, config, executor)
    live = LiveModel(config, model, executor.pipelined.use_model, WeightReceiver(0, torch.device("cpu")))
    driver.admit(0, prompt(9), spec())
    assert driver.step(num_drafts=NUM_DRAFTS).drafts
    before = addresses(model.head)
    for slot in (1, 2, 3):
        assert live.load(LoadWeights(0, str(other)), in_place=slot == 1)[0] == ""
        request = driver.admit(slot, prompt(20 + slot, seed=slot), spec())
        drafts = dict(driver.step(num_drafts=NUM_DRAFTS).drafts)
        assert list(drafts[slot]) == expected_drafts(other, head, request.token_ids)[1]
        if slot == 1:
            assert addresses(live.model.head) == before, "graphs know them"
        elif slot == 2:
            old_head = weakref.ref(live.model.head)
            live.release(2)
            assert old_head() is None, "its memory is needed for the new one"


def test_heads_draft_for_updated_weights(target: Path, method: str, head: Path, tmp_path: Path) -> None:
    other = make_tiny("LlamaForCausalLM", tmp_path, seed=1, num_hidden_layers=EAGLE3_LAYERS)
    check_update(target, other, head, speculating(method, head))


def test_a_layer_for_multi_token_prediction_comes_with_the_weights_of_an_update(tmp_path: Path) -> None:
    target, _ = make_mtp("Glm4MoeForCausalLM", tmp_path / "old", num_layers=2)
    other, layer = make_mtp("Glm4MoeForCausalLM", tmp_path / "new", num_layers=2, seed=5)
    check_update(target, other, layer.rows, MTP)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_heads_compute_the_published_formulas(target: Path, method: str, head: Path, kernels: str) -> None:
    check_formula(target, head, speculating(method, head), kernels)


def results_of(
    target: Path, requests: list[TimedRequest], num_blocks: int, **settings: Any
) -> tuple[list[Result], Any]:
    config = worker_config(target, max_model_len=128, **settings)
    is_native = config.cpu_kernels != "torch"
    engine = SmallEngine(loaded(config, is_native=is_native), config, num_blocks, num_host_blocks=20)
    return engine.run(requests), engine.scheduler.stats()


def storm(seed: int, count: int) -> list[TimedRequest]:
    rng = random.Random(seed)
    shared = prompt(20, seed=99)
    kinds: list[SamplingSpec] = [
        spec(logprobs=2),
        spec(temperature=0.8, seed=5, logprobs=1),
        spec(temperature=1.1, seed=6, frequency_penalty=0.4, repetition_penalty=1.1),
    ]
    return [
        TimedRequest(
            shared[: rng.choice([0, 20])] + prompt(rng.randint(1, 40), seed=number),
            msgspec.structs.replace(kinds[number % 3], max_tokens=rng.randint(1, 24)),
            arrives_at=rng.randint(0, 20),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int4"}])
def test_a_storm_has_the_bits_of_engines_without_a_head(
    target: Path, method: str, head: Path, settings: dict[str, str]
) -> None:
    requests = storm(3, 12)
    common = {"max_num_seqs": 6, "max_num_batched_tokens": 40, "block_size": 8, **settings}
    expected, _ = results_of(target, requests, 200, **common)
    got, stats = results_of(target, requests, 40, **common, speculative_config=speculating(method, head))
    assert got == expected
    assert stats.spec_decode_num_draft_tokens > 0


def test_a_head_that_knows_its_model_is_right(tmp_path: Path) -> None:
    """The model's next token depends on the last one only, and so does the head's."""
    target, head = make_tiny("LlamaForCausalLM", tmp_path / "model"), make_head("eagle", tmp_path / "head")
    for directory in (target, head):
        depend_on_the_last_token(directory)
    requests = [TimedRequest(prompt(9, seed=1), spec(max_tokens=40))]
    got, stats = results_of(target, requests, 20, speculative_config=speculating("eagle", head))
    expected, _ = results_of(target, requests, 20)
    assert got == expected
    assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens > 20


@pytest.mark.parametrize(
    ("overrides", "settings", "message"),
    [
        ({"hidden_size": 96}, {}, "hidden_size is 96, the model's is 48"),
        ({"vocab_size": 999}, {}, "vocab_size is 999, the model's is 320"),
        ({}, {"pipeline_parallel_size": 2}, "across pipeline stages"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, {"tensor_parallel_size": 2}, "--tensor-parallel-size 2"),
        ({}, {"enable_prompt_embeds": True}, "may have embeddings or media"),
        ({"hidden_act": "gelu"}, {}, "'hidden_act' is 'gelu'"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 9]}},
            {},
            r"layers \[2, 3, 9\], of a model with 4",
        ),
        ({"intermediate_size": 96}, {}, "_proj.weight' has shape"),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    target: Path, tmp_path: Path, overrides: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    head = make_head("eagle3", tmp_path / "head", **overrides)
    with pytest.raises(ConfigError, match=message) as refused:
        loaded(worker_config(target, speculative_config=speculating("eagle3", head), **settings))
    assert "speculative_config" in str(refused.value)


def check_a_head_in_place(live: LiveModel, other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Update as on a GPU with heads that fail after the check of their names and shapes."""
    before = {name: tensor.clone() for name, tensor in live.model.parameters.tensors.items()}

    def without_memory(*args: Any) -> NoReturn:
        raise RuntimeError("out of memory")

    def with_another_layer(*args: Any) -> tuple[Any, Any]:
        parameters = SimpleNamespace(tensors={"another.weight": torch.zeros(1)}, packed={})
        return SimpleNamespace(parameters=parameters), None

    faults = []
    for read in (without_memory, with_another_layer):
        with monkeypatch.context() as patch:
            patch.setattr(update, "read_head", read)
            faults.append(live.load(LoadWeights(0, str(other)), in_place=True)[0])
        assert all(before[name].equal(tensor) for name, tensor in live.model.parameters.tensors.items())
    assert faults[0] == "out of memory" and "has a head with other tensors" in faults[1]


def test_an_update_whose_head_cannot_be_loaded_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = make_mtp("Glm4MoeForCausalLM", tmp_path / "old", num_layers=2)
    other, _ = make_mtp("Glm4MoeForCausalLM", tmp_path / "new", num_layers=2, seed=5)
    config = worker_config(target, speculative_config=MTP)
    model = loaded(config)
    live = LiveModel(config, model, lambda model: None, WeightReceiver(0, torch.device("cpu")))
    weights = load_file(other / "model.safetensors")
    save_file(
        {"model.layers.2.eh_proj.weight": weights["model.layers.2.eh_proj.weight"]}, tmp_path / "half.safetensors"
    )
    save_file({"model.norm.weight": weights["model.norm.weight"]}, tmp_path / "norm.safetensors")
    for is_check in (True, False):
        half = LoadWeights(0, str(tmp_path / "half.safetensors"), is_partial=True, is_check=is_check)
        fault, _ = live.load(half, in_place=False)
        assert "enorm" in fault and "has all tensors of the MTP layer, or none" in fault
        assert live.model is model and model.head is not None
    check_a_head_in_place(live, other, monkeypatch)
    (target / "model.safetensors").rename(target / "moved")
    norm = LoadWeights(0, str(tmp_path / "norm.safetensors"), is_partial=True)
    fault, _ = live.load(norm, in_place=False)
    assert str(target) in fault and live.model is model, "the files of the head are gone"
    assert live.load(LoadWeights(0, str(other)), in_place=False)[0] == ""
    assert live.load(norm, in_place=False)[0] == "", "the head has other files now"
