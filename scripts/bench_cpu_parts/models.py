"""The models of the benchmark in the format of each engine; created on first use and cached."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import fetch_default_model
import make_bf16_checkpoint
from gguf import GGUFReader

from octavo.protocol.env import Env

ModelName = Literal["smollm2", "smollm2-q4_1", "qwen2.5-0.5b", "qwen3-moe", "gemma3-1b"]
"""SmolLM2-135M in bfloat16; the published 4-bit version; random weights in bfloat16 of three shapes."""


def directory(name: ModelName) -> Path:
    """Return the model in Hugging Face layout; for the 4-bit model, which has none, the bfloat16 one."""
    return _bf16(name).directory


def gguf(name: ModelName) -> Path:
    """Return the model as a GGUF file."""
    return fetch_default_model.fetch() if name == "smollm2-q4_1" else _bf16(name).gguf


def quantized_gguf(kind: str) -> Path:
    """Return SmolLM2 as a GGUF file with blocks of this type, such as Q8_0, written by `octavo quantize`.

    Raises:
        SystemExit: `octavo quantize` failed; the message has its last lines.
    """
    source = directory("smollm2")
    target = Env.read().cache_dir / "models" / f"{source.name}.{kind}.gguf"
    if not target.is_file():
        program = Path(sys.executable).parent / "octavo"
        command: list[str | Path] = [program, "quantize", source, target, "--format", "gguf", "--gguf-type", kind]
        done = subprocess.run([*command, "--no-evaluation"], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit("octavo quantize failed:\n" + "\n".join(done.stderr.splitlines()[-15:]))
    return target


def config(name: ModelName) -> dict[str, Any]:
    """Return the model's config.json."""
    content: dict[str, Any] = json.loads((directory(name) / "config.json").read_text())
    return content


def bits_per_weight(name: ModelName) -> float:
    """Return the average bits over all weights, including scales."""
    if name != "smollm2-q4_1":
        return 16.0
    tensors = GGUFReader(gguf(name)).tensors
    return 8 * sum(int(tensor.n_bytes) for tensor in tensors) / sum(int(tensor.n_elements) for tensor in tensors)


def openvino(name: ModelName, python: Path) -> Path:
    """Return the model as OpenVINO's intermediate representation with 16-bit weights.

    Blocks for about half a minute if optimum-intel in OpenVINO's Python has to convert it.

    Raises:
        SystemExit: the conversion failed; the message has its last lines.
    """
    source = directory(name)
    target = Env.read().cache_dir / "openvino" / source.name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        draft = Path(scratch) / source.name
        command: list[str | Path] = [python.parent / "optimum-cli", "export", "openvino", "--model", source]
        command += ["--task", "text-generation-with-past", "--weight-format", "fp16", draft]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not (draft / "openvino_model.xml").is_file():
            raise SystemExit("optimum-intel cannot convert the model:\n" + "\n".join(done.stderr.splitlines()[-15:]))
        if not target.is_dir():
            shutil.move(draft, target)
    return target


def _bf16(name: ModelName) -> make_bf16_checkpoint.Model:
    return make_bf16_checkpoint.make(name if name in make_bf16_checkpoint.SHAPES else None)
