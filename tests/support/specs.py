"""Launch specs and configurations for tests that need one but do not depend on its contents."""

import os
from pathlib import Path
from typing import Any

from octavo.protocol.config import EngineConfig, ModelConfig, ModelFacts, ResolvedConfig, resolve
from octavo.protocol.config.sources import engine_config
from octavo.protocol.control import CoreSpec

PYTHONPATH = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
"""PYTHONPATH of child processes that run a module of this folder, with the octavo of the tests."""


def some_facts(**changes: Any) -> ModelFacts:
    """Return facts of a model that does not exist."""
    values: dict[str, Any] = {
        "model_path": "/nowhere",
        "tokenizer_path": "/nowhere",
        "load_format": "safetensors",
        "architecture": "LlamaForCausalLM",
        "hf_config": {},
        "vocab_size": 100,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 2048,
        "checkpoint_dtype": "float32",
        "eos_token_ids": [2],
    }
    return ModelFacts(**{**values, **changes})


def some_config(**settings: Any) -> ResolvedConfig:
    """Return a resolved configuration, with engine settings by their flat names."""
    said: EngineConfig = engine_config({"model": "nowhere", **settings})
    assert isinstance(said.model, ModelConfig)
    return resolve(said, some_facts(), device="cpu", num_cores=2)


def core_spec(address: str, run_dir: Path | str = "/nowhere", **settings: Any) -> CoreSpec:
    """Return a core's launch spec."""
    return CoreSpec(config=some_config(**settings), address=address, run_dir=str(run_dir), epoch=1)
