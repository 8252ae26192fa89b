"""Adapters that peft itself writes, and the same adapters merged into their models, as the oracle."""

import warnings
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from octavo.protocol.adapters import Adapter, AdapterLoad, adapter_digest


def write_adapter(model_path: Path, path: Path, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """Write an adapter with random factors, and return the model with the adapter merged into it, in float32.

    `settings`: of `peft.LoraConfig`.
    """
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    settings = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft asks transformers for what is deprecated, and warns of tied tables
        adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
        noise = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, tensor in adapted.named_parameters():
                if "lora_" in name:
                    tensor.copy_(torch.randn(tensor.shape, generator=noise) * tensor.shape[-1] ** -0.5)
        adapted.save_pretrained(str(path))
        merged: PreTrainedModel = adapted.merge_and_unload().eval()
    return merged


def adapter_at(path: Path, name: str = "adapter", rank: int = 8) -> Adapter:
    """Return what a frontend would send of an adapter."""
    return Adapter(name, adapter_digest(path), str(path), rank)


def load_of(path: Path, slot: int = 0) -> AdapterLoad:
    """Return the load of an adapter."""
    return AdapterLoad(slot, adapter_at(path, f"adapter {slot}"))
