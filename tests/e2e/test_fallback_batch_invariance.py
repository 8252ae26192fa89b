"""What is tried of models that run through transformers: batches at the start, and all architectures by a script."""

import importlib.util
import logging
from pathlib import Path

import pytest
from source_tree import ROOT
from tiny_fallback import FALLBACKS
from tiny_families import FAMILIES
from tiny_models import make_tiny
from worker_plans import loaded as loaded_as
from worker_plans import worker_config

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.fallback.model import TransformersModel
from octavo.worker_proc.runners.torch.batch_invariance import check_batch_invariance

WITH_FAMILY = ("gemma3", "cohere2", "gpt-neox", "phi", "smollm3")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trials")


def tiny(name: str, root: Path) -> Path:
    arch, class_name, settings = (FALLBACKS | FAMILIES)[name]
    directory = root / name
    return directory if directory.exists() else make_tiny(arch, directory, class_name=class_name, **settings)


@pytest.mark.long
@pytest.mark.parametrize("name", [*FALLBACKS, *WITH_FAMILY])
def test_the_trial_finds_nothing(name: str, root: Path) -> None:
    config = worker_config(tiny(name, root), model_impl="transformers", max_model_len=512)
    assert check_batch_invariance(loaded_as(config), config) == ""


@pytest.mark.long
def test_the_sweep_says_what_runs_and_why_the_others_do_not() -> None:
    spec = importlib.util.spec_from_file_location("sweep_fallback", ROOT / "scripts" / "sweep_fallback.py")
    assert spec and spec.loader
    sweep = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sweep)
    names = ("CTRLLMHeadModel", "XGLMForCausalLM", "MambaForCausalLM")
    results = {name: sweep.result_of(name) for name in names}
    assert results == {
        "CTRLLMHeadModel": "runs",
        "XGLMForCausalLM": "refused: 0 of 3 layers attend through the attention interface",
        "MambaForCausalLM": "refused: layers with a recurrent state",
    }
    rows = sweep.table({**results, "JambaForCausalLM": results["MambaForCausalLM"]}).splitlines()
    assert rows[-3] == "| runs | `CTRLLMHeadModel` |"
    assert rows[-2].endswith("| `MambaForCausalLM`, `JambaForCausalLM` |")


def trial_with(change: str, root: Path, patch: pytest.MonkeyPatch) -> str:
    """Try a model one of whose modules computes something of its whole batch."""
    config = worker_config(tiny("stablelm", root))
    model = loaded_as(config)
    assert isinstance(model, TransformersModel)
    module = model.module.get_submodule("model.layers.1.mlp.act_fn")
    plain = module.forward
    factors = {"rounds": lambda x: 1 + 1e-6 * x.shape[1], "mixes": lambda x: 1 + x.mean(1, keepdim=True)}
    patch.setattr(module, "forward", lambda x: plain(x) * factors[change](x))
    return check_batch_invariance(model, config)


def test_a_module_that_depends_on_its_batch_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert trial_with("rounds", root, monkeypatch) == "model.layers.1.mlp.act_fn"
    assert "the rows of module model.layers.1.mlp.act_fn" in caplog.text


def test_models_without_such_modules_say_so(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = worker_config(tiny("stablelm", root))
    with caplog.at_level(logging.INFO):
        assert check_batch_invariance(loaded_as(config), config) == ""
    assert "StableLmForCausalLM runs through transformers" in caplog.text


def test_a_module_that_mixes_requests_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"model.layers.1.mlp.act_fn mixes the rows of requests"):
        trial_with("mixes", root, monkeypatch)


def test_a_use_of_a_weight_that_appears_only_with_weights_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = worker_config(tiny("stablelm", root))
    model = loaded_as(config)
    assert isinstance(model, TransformersModel)
    module = model.module.get_submodule("model.layers.1.mlp.up_proj")
    monkeypatch.setattr(module, "forward", lambda x: x @ (module.weight * 2).T)
    with pytest.raises(ConfigError, match="with a packed weight, of which only products were seen"):
        check_batch_invariance(model, config)
