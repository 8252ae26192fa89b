"""Adapters in PEFT's format without peft, for tests that compute nothing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def write_adapter(
    directory: Path,
    *,
    rank: int = 4,
    width: int = 8,
    module: str = "model.layers.0.self_attn.q_proj",
    value: float = 0.5,
    **settings: Any,
) -> Path:
    """Write an adapter of one square module and return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [module.rpartition(".")[2]]}
    config["base_model_name_or_path"] = "org/base"
    (directory / "adapter_config.json").write_text(json.dumps(config | settings))
    name = f"base_model.model.{module}"
    factors = {
        f"{name}.lora_A.weight": np.full((rank, width), value, dtype=np.float32),
        f"{name}.lora_B.weight": np.full((width, rank), value, dtype=np.float32),
    }
    save_file(factors, directory / "adapter_model.safetensors")
    return directory
