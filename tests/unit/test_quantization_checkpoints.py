"""`octavo quantize`: whole checkpoints of tiny models, read by transformers, and what is refused."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_models import make_tiny

from octavo.protocol.errors import ConfigError
from octavo.protocol.quantization_job import QuantizationJob
from octavo.worker_proc.quantization import awq, checkpoint
from octavo.worker_proc.quantization.calibration import Blocks
from octavo.worker_proc.quantization.run import quantize

TEXT = "One request, one batch, one block: the same tokens in the same order. " * 80


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    home = tmp_path_factory.mktemp("quantization")
    make_tiny("LlamaForCausalLM", home / "model")
    (home / "text.txt").write_text(TEXT)
    return home / "model"


def job(model: Path, out: Path, kind: str, **changes: Any) -> QuantizationJob:
    is_calibrated = kind in ("gptq", "awq")
    settings: dict[str, Any] = {"group_size": 16, "num_samples": 6, "sample_tokens": 64, **changes}
    if is_calibrated:
        settings.setdefault("calibration", str(model.parent / "text.txt"))
    return QuantizationJob(source=str(model), out=str(out), format=kind, **settings)


def loaded(path: Path, **settings: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **settings).eval()


def relative_error(values: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((values - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("kind", "largest"), [("int8", 0.01), ("int4", 0.12), ("fp8", 0.04)])
def test_transformers_loads_what_was_written(model: Path, tmp_path: Path, kind: str, largest: float) -> None:
    shares: list[float] = []
    finished = quantize(job(model, tmp_path / "out", kind), shares.append)
    assert finished.num_layers == 14
    assert shares == sorted(shares) and shares[-1] == pytest.approx(1.0, abs=0.05)
    with pytest.warns(UserWarning, match="already has a `quantization_config`"):
        quantized = loaded(tmp_path / "out", quantization_config=transformers.CompressedTensorsConfig(dequantize=True))
    original = loaded(model)
    for name, values in original.state_dict().items():
        read = quantized.state_dict()[name]
        if ".self_attn." in name or ".mlp." in name:
            assert 0 < relative_error(read, values) < largest, name
        else:
            assert torch.equal(read, values), name


def test_other_files_are_copied(model: Path, tmp_path: Path) -> None:
    source = shutil.copytree(model, tmp_path / "source")
    (source / "chat_template.jinja").write_text("one")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("two")
    quantize(job(source, tmp_path / "out", "int8"), lambda share: None)
    written, read = ({str(file.relative_to(home)) for file in home.rglob("*")} for home in (tmp_path / "out", source))
    assert written == read
    before, after = (json.loads((path / "config.json").read_text()) for path in (model, tmp_path / "out"))
    assert after.pop("quantization_config")["format"] == "int-quantized"
    assert before == after


def test_large_checkpoints_have_several_files(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    quantize(job(model, tmp_path / "one", "fp8"), lambda share: None)
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 30_000)
    quantize(job(model, tmp_path / "several", "fp8"), lambda share: None)
    index = json.loads((tmp_path / "several/model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "several").glob("*.safetensors"))
    assert len(files) > 2
    several = {name: values for file in files for name, values in load_file(file).items()}
    for name, values in load_file(tmp_path / "one/model.safetensors").items():
        assert several[name].dtype == values.dtype and torch.equal(several[name].float(), values.float())
        assert name in load_file(tmp_path / "several" / index["weight_map"][name])


def test_a_place_that_cannot_be_written(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/out cannot be written: .* Not a directory"):
        quantize(job(model, tmp_path / "file" / "out", "int8"), lambda fraction: None)

    def fill_disk(tensors: Any, path: Path, metadata: Any) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", fill_disk)
    with pytest.raises(ConfigError, match=r"out cannot be written: .* No space left") as caught:
        quantize(job(model, tmp_path / "out", "int8"), lambda fraction: None)
    assert "free space" in caught.value.hint and not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_calibrated_checkpoints_lose_less_than_rounded_ones(model: Path, tmp_path: Path, kind: str) -> None:
    """The first block, whose inputs are those of the original: its rounded weights give outputs that are closer."""
    finished = quantize(job(model, tmp_path / "out", kind), lambda share: None)
    assert finished.num_layers == 14
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert {name for name in tensors if name.startswith("model.layers.1.mlp.up_proj")} == {
        f"model.layers.1.mlp.up_proj.{part}"
        for part in ("qweight", "qzeros", "scales", *(["g_idx"] if kind == "gptq" else []))
    }
    norm = tensors["model.layers.0.input_layernorm.weight"]
    assert torch.equal(norm, loaded(model).model.layers[0].input_layernorm.weight) == (kind == "gptq")
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["quant_method"] == kind and config["group_size"] == 16


def test_scaling_a_block_changes_its_weights_and_not_its_outputs(model: Path, tmp_path: Path) -> None:
    blocks = Blocks(job(model, tmp_path, "awq"))
    _, block = next(iter(blocks))
    before = {name: values.clone() for name, values in block.state_dict().items()}
    wanted = blocks._run(block, blocks._hidden[0])
    awq.scale_block(block, blocks, 16)
    assert relative_error(blocks._run(block, blocks._hidden[0]), wanted) < 1e-5
    changed = {name for name, values in block.state_dict().items() if not torch.equal(values, before[name])}
    assert {
        "input_layernorm.weight",
        "self_attn.q_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    } <= changed


def test_blocks_see_the_outputs_of_their_quantized_predecessors(model: Path, tmp_path: Path) -> None:
    """Without changes between them, the blocks compute what the model computes."""
    blocks = Blocks(job(model, tmp_path, "gptq"))
    for _ in blocks:
        pass
    tokens = transformers.AutoTokenizer.from_pretrained(model)(TEXT)["input_ids"][:64]
    with torch.no_grad():
        hidden = loaded(model)(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1]
    assert relative_error(blocks.model.model.norm(blocks._hidden[0]), hidden) < 1e-5


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("int4", {"group_size": 32}, r"48 inputs and 96 outputs, which groups of 32"),
        ("gptq", {"sample_tokens": 100_000}, r"fewer than the 100000 of a sample"),
        ("awq", {"calibration": "/nowhere"}, r"--calibration /nowhere"),
    ],
)
def test_what_cannot_be_quantized_leaves_nothing(
    model: Path, tmp_path: Path, kind: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        quantize(job(model, tmp_path / "out", kind, **changes), lambda share: None)
    assert not (tmp_path / "out").exists()


def test_models_that_are_refused(model: Path, tmp_path: Path) -> None:
    quantize(job(model, tmp_path / "quantized", "int8"), lambda share: None)
    with pytest.raises(ConfigError, match="quantized already"):
        quantize(job(tmp_path / "quantized", tmp_path / "out", "int4"), lambda share: None)
    with pytest.raises(ConfigError, match="exists already"):
        quantize(job(model, tmp_path / "quantized", "int4"), lambda share: None)
    with pytest.raises(ConfigError, match="no safetensors"):
        quantize(job(tmp_path, tmp_path / "out", "int4"), lambda share: None)
    make_tiny("OPTForCausalLM", tmp_path / "opt")
    text = str(model.parent / "text.txt")
    with pytest.raises(ConfigError, match="OPTForCausalLM"):
        quantize(job(tmp_path / "opt", tmp_path / "out", "awq", calibration=text), lambda share: None)
    make_tiny("MixtralForCausalLM", tmp_path / "experts")
    with pytest.raises(ConfigError, match=r"experts\.0\.w1"):
        quantize(job(tmp_path / "experts", tmp_path / "out", "gptq", calibration=text), lambda share: None)


def test_experts_are_quantized_and_their_routers_are_not(tmp_path: Path) -> None:
    make_tiny("MixtralForCausalLM", tmp_path / "model")
    quantize(job(tmp_path / "model", tmp_path / "out", "int8"), lambda share: None)
    tensors = load_file(tmp_path / "out/model.safetensors")
    experts = [name for name in tensors if ".experts." in name and name.endswith(".weight")]
    assert experts and all(tensors[name].dtype == torch.int8 for name in experts)
    routers = [name for name in tensors if name.endswith(".gate.weight")]
    assert routers and all(tensors[name].dtype == torch.float32 for name in routers)
