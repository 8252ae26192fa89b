"""Models in several GGUF files, as llama.cpp and the gguf package divide them."""

import shutil
from pathlib import Path

import pytest
import torch
from gguf_converter import convert
from model_runner import facts_of
from tiny_models import make_tiny
from torch import Tensor

from octavo.frontend.model_files.facts import read_model_facts
from octavo.protocol.config.sources import engine_config
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.registry import build_model
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.weights.gguf import read_gguf
from octavo.worker_proc.weights.reader import read_weights


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model as one file, and divided in `parts`."""
    root = tmp_path_factory.mktemp("parts")
    source = make_tiny("DeepseekV2ForCausalLM", root / "source")  # keys and values of `kv_b_proj` are two tensors
    convert(source, root / "whole.gguf")
    (root / "parts").mkdir()
    convert(source, root / "parts" / "model.gguf", tensors_per_file=9)
    return root


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


def weights(path: Path) -> dict[str, Tensor]:
    facts = read_model_facts(engine_config({"model": str(path)}).model, Env.read())
    built = build_model(facts, Placement(torch.float32))
    progress: list[float] = []
    built.load_weights(read_weights(facts, progress.append, built.parameters.wants))
    assert progress == sorted(progress) and progress[-1] > 0.9
    return dict(built.named_parameters())


def test_any_part_or_the_directory_names_the_model(model: Path) -> None:
    expected = weights(model / "whole.gguf")
    files = sorted((model / "parts").iterdir())
    assert len(files) > 3 and files[0].name.endswith(f"-00001-of-{len(files):05}.gguf")
    assert {facts_of(path).model_path for path in (files[0], files[-1], model / "parts")} == {str(files[0])}
    for path in (files[1], model / "parts"):
        actual = weights(path)
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_missing_parts_are_named(model: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(model / "parts", tmp_path / "parts")
    first, second, *rest = sorted(directory.iterdir())
    second.unlink()
    for path in (first, rest[0], directory):
        with pytest.raises(
            ConfigError, match=rf"1 of the {len(rest) + 2} files of model are missing .*: {second.name}"
        ):
            facts_of(path)
    with pytest.raises(ConfigError, match=second.name):
        list(read_gguf(first))


def test_names_must_say_which_part_a_file_is(model: Path, tmp_path: Path) -> None:
    files = sorted((model / "parts").iterdir())
    alone = shutil.copy(files[0], tmp_path / "alone.gguf")
    with pytest.raises(ConfigError, match=rf"alone\.gguf holds part 1 of a model of {len(files)} files") as caught:
        facts_of(alone)
    assert f"NAME-00001-of-{len(files):05}.gguf" in caught.value.hint
    directory = shutil.copytree(model / "parts", tmp_path / "parts")
    shutil.copy(files[2], directory / files[1].name)
    with pytest.raises(ConfigError, match=rf"{files[1].name} holds part 3 of"):
        facts_of(directory)


def test_a_directory_of_two_models_is_refused(model: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(model / "parts", tmp_path / "parts")
    shutil.copy(model / "whole.gguf", directory)
    with pytest.raises(ConfigError, match="holds several models"):
        facts_of(directory)
