"""Adapters that peft itself writes, and the same adapters merged into their models, as the oracle.

Each test process imports this module, and few need peft, which takes a second: functions import it.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from octavo.protocol.adapters import Adapter, AdapterLoad, adapter_digest


def write_adapter(model_path: Path, path: Path, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """Write an adapter with random factors, and return the model with the adapter merged into it, in float32.

    `settings`: of `peft.LoraConfig`.
    """
    import peft

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    settings = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings}
    with warnings.catch_warnings():
        # peft calls deprecated functions of transformers, and warns about tied embeddings
        warnings.simplefilter("ignore")
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
    """Return the adapter as a frontend would send it."""
    return Adapter(name, adapter_digest(path), str(path), rank)


def load_of(path: Path, slot: int = 0) -> AdapterLoad:
    """Return the load of an adapter."""
    return AdapterLoad(slot, adapter_at(path, f"adapter {slot}"))


def write_soft_prompt(model: Path, directory: Path, num_rows: int) -> None:
    """Write a soft prompt with random rows, as peft's prompt tuning does."""
    import peft

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        tuned = peft.get_peft_model(base, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=num_rows))
        rows = tuned.prompt_encoder["default"].embedding.weight
        rows.data = torch.randn(rows.shape, generator=torch.Generator().manual_seed(9)) * 0.3
        tuned.save_pretrained(str(directory))


def tokens_of_peft(model: Path, directory: Path, tokens: list[int], num_tokens: int) -> list[int]:
    """Return the tokens that peft generates greedily after a soft prompt and some tokens."""
    import peft

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([tokens])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        tuned = peft.PeftModel.from_pretrained(base, str(directory))
        for _ in range(num_tokens):
            ids = torch.cat((ids, tuned(input_ids=ids).logits[:, -1:].argmax(-1)), 1)
    found: list[int] = ids[0, len(tokens) :].tolist()
    return found
