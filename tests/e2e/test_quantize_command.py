"""`octavo quantize` as a command: the child that does the work, the comparison at the end, and errors before it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_tiny
from transformers import AutoModelForCausalLM
from transformers_gguf import from_gguf

from octavo import LLM, SamplingParams
from octavo.frontend.cli.errors import CommandError
from octavo.frontend.cli.main import main
from octavo.frontend.cli.quantize import compared, do, run
from octavo.frontend.evaluation.quality import Reading, read
from octavo.protocol.quantization_job import QuantizationJob

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 16 << 20}


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("quantize") / "model"
    make_tiny("LlamaForCausalLM", path)
    return path


def test_a_gguf_file_gives_the_tokens_of_the_checkpoint(model: Path, tmp_path: Path, capsys: Any) -> None:
    """In 8 bits a tiny model's answers to a text hardly change; the tokenizer and the order of rows must be right."""
    out = tmp_path / "model.gguf"
    assert main(["quantize", str(model), str(out), "--format", "gguf", "--no-evaluation"]) == 0
    assert "4 layers quantized" in capsys.readouterr().out  # 48 inputs are not whole blocks of 32
    readings = []
    for path in (model, out):
        with LLM(str(path), quantization="none", **SETTINGS) as llm:
            readings.append(read(llm, "One request, one batch, one block. " * 12, piece_tokens=200))
            answer = llm.generate(["The fox"], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)[0]
            assert answer.prompt_token_ids is not None
    assert readings[0].agreement(readings[1]) > 0.9
    assert readings[1].perplexity == pytest.approx(readings[0].perplexity, rel=0.05)
    original = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    read_back = from_gguf(AutoModelForCausalLM, out, dtype=torch.float32).state_dict()
    assert read_back.keys() == original.keys()
    for name, values in original.items():
        assert (read_back[name] - values).norm() < 0.01 * values.norm(), name


def test_the_child_says_why_it_failed(model: Path, tmp_path: Path) -> None:
    job = QuantizationJob(source=str(model), out=str(tmp_path / "out"), format="int4", group_size=32)
    with pytest.raises(CommandError, match="groups of 32") as caught:
        do(job)
    assert caught.value.hint == "use --group-size 16"
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_is_written(model: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert run([str(model), str(out), "--format", "int4", "--group-size", "16", "--no-evaluation"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == str(out)
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == 16


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--format", "gptq"], "needs --calibration"),
        (["--format", "int8", "--calibration", "text.txt"], "has no --calibration"),
        (["--format", "awq", "--calibration", "text.txt", "--desc-act"], "has no --desc-act"),
        (["--format", "int4", "--group-size", "20"], "multiple of 16"),
        (["--format", "gguf"], ".gguf file"),
        (["--format", "int8", "--group-size", "64"], "has no --group-size"),
        (["--format", "int4", "--gguf-type", "Q4_0"], "has no --gguf-type"),
        (["--format", "gptq", "--calibration", "text.txt", "--num-samples", "0"], "--num-samples must be 1"),
        (["--format", "int8", "--evaluation-text", "/nowhere"], "--evaluation-text /nowhere"),
    ],
)
def test_wrong_flags(model: Path, tmp_path: Path, flags: list[str], message: str) -> None:
    with pytest.raises(CommandError, match=message):
        run([str(model), str(tmp_path / "out"), *flags])
    assert not (tmp_path / "out").exists()


def test_the_comparison_names_perplexities_and_agreement() -> None:
    original, quantized = Reading([-1.0, -1.0], [5, 6]), Reading([-1.5, -1.5], [5, 7])
    assert compared(original, quantized).splitlines() == [
        "perplexity 2.718 -> 4.482 (+64.87%), 2 tokens",
        "the same token is the likeliest in 50.0%",
    ]
