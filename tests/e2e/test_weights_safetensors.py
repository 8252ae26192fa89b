"""safetensors files in all layouts, random weights, and errors when something is missing."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import ARCHITECTURES, make_tiny
from worker_plans import alone, loaded, spec, worker_config

from octavo.protocol.errors import ConfigError, NotEnoughMemoryError
from octavo.protocol.weight_files import weight_files
from octavo.worker_proc.models.registry import build_model
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.weights import load as loading
from octavo.worker_proc.weights.dummy import fill_dummy
from octavo.worker_proc.weights.reader import read_weights
from octavo.worker_proc.weights.safetensors import read_safetensors


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny("LlamaForCausalLM", tmp_path / "model")


def split(model: Path, *, with_index: bool) -> list[str]:
    """Replace the one file by three; return their names."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    weight_map = {}
    for number in range(3):
        part = dict(list(tensors.items())[number::3])
        name = f"model-{number + 1:05}-of-00003.safetensors"
        save_file(part, model / name)
        weight_map |= dict.fromkeys(part, name)
    if with_index:
        (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sorted(set(weight_map.values()))


def read(model: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor, _ in read_safetensors(weight_files(model, "safetensors"))}


@pytest.mark.parametrize("with_index", [True, False])
def test_shards_hold_what_the_single_file_held(model: Path, with_index: bool) -> None:
    expected = read(model)
    split(model, with_index=with_index)
    got = read(model)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_missing_shard_is_named(model: Path) -> None:
    names = split(model, with_index=True)
    (model / names[1]).unlink()
    with pytest.raises(ConfigError, match=rf"1 of 3 weight files .* missing from .*: {names[1]}$"):
        read(model)


def test_damage_is_named_with_the_file(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors \(\d+ bytes\)"):
        read(model)


def test_a_damaged_index_is_named(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text('{"weights": {}}')
    with pytest.raises(ConfigError, match=r"cannot read .*index\.json: KeyError"):
        read(model)


def test_tensors_that_a_shard_lacks_are_named(model: Path) -> None:
    names = split(model, with_index=True)
    save_file({"other": torch.zeros(2)}, model / names[1])
    with pytest.raises(
        ConfigError, match=rf"{names[1]} lacks \d+ tensors that model\.safetensors\.index\.json expects"
    ):
        read(model)


def test_a_pointer_of_git_lfs_is_recognized(model: Path) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 99\n")
    with pytest.raises(ConfigError, match="is not the file but its Git LFS pointer") as caught:
        read(model)
    assert caught.value.hint == "run: git lfs pull"


def test_without_weights_the_files_that_were_looked_for_are_named(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        read(model)


def test_eight_bit_tensors_are_rejected_by_name(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, model / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"tensor {name} in model\.safetensors is of type F8_E4M3"):
        read(model)


def test_progress_rises_to_the_end(model: Path) -> None:
    reported: list[float] = []
    list(read_weights(worker_config(model).model, reported.append, lambda name: True))
    assert reported == sorted(set(reported))
    assert reported[-1] > 0.9


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_dummy_weights_need_no_file_and_give_finite_different_logprobs(arch: str, tmp_path: Path) -> None:
    model = make_tiny(arch, tmp_path / "model")
    (model / "model.safetensors").unlink()
    config = worker_config(model, load_format="dummy")
    entries = alone(loaded(config), config, [5, 6, 7, 8], spec(prompt_logprobs=3), 1).prompt_logprobs
    values = [value for entry in entries for value in entry.logprobs]
    assert all(-50 < value < 0 for value in values)
    assert len(set(values)) > 6


def test_dummy_weights_depend_on_the_seed_alone(model: Path) -> None:
    first, again, other = (dummy(model, seed) for seed in (1, 1, 2))
    assert len(first) > 10
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def dummy(model: Path, seed: int) -> dict[str, torch.Tensor]:
    """Return a model's tensors filled with dummy values."""
    built = build_model(worker_config(model, load_format="dummy").model, Placement(torch.float32))
    fill_dummy(built.named_parameters(), seed)
    return dict(built.named_parameters())


def test_a_checkpoint_of_another_model_is_rejected(model: Path) -> None:
    config = worker_config(model)
    facts = msgspec.structs.replace(config.model, model_path=str(make_tiny("OPTForCausalLM", model.parent / "other")))
    with pytest.raises(ConfigError, match="does not have"):
        loaded(msgspec.structs.replace(config, model=facts))


def test_too_little_memory_is_told_from_other_failures(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_with(make_error: Callable[[], object]) -> type[Exception]:
        monkeypatch.setattr(loading, "read_text_weights", lambda *_: make_error())
        with pytest.raises(Exception, match=r".") as caught:
            loaded(worker_config(model))
        return caught.type

    def no_address_space() -> None:
        raise MemoryError("no memory for 1 bytes")

    assert fail_with(lambda: torch.empty(2**50)) is NotEnoughMemoryError
    assert fail_with(no_address_space) is NotEnoughMemoryError
    assert fail_with(lambda: torch.empty(3) @ torch.empty(4)) is RuntimeError
