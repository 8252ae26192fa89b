"""Which file implements which architecture. Importing it imports no model."""

from importlib import import_module

import torch

from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.base import Model

ARCHITECTURES = {
    "GPT2LMHeadModel": "octavo.worker_proc.models.gpt2",
    "LlamaForCausalLM": "octavo.worker_proc.models.llama",
    "MistralForCausalLM": "octavo.worker_proc.models.llama",
    "OPTForCausalLM": "octavo.worker_proc.models.opt",
    "Qwen2ForCausalLM": "octavo.worker_proc.models.llama",
    "Qwen3ForCausalLM": "octavo.worker_proc.models.llama",
}
"""Architecture, as in `config.json`, to the module whose `build` makes it."""

_CPU = torch.device("cpu")


def build_model(facts: ModelFacts, dtype: torch.dtype, device: torch.device = _CPU) -> Model:
    """Make the model that `facts` describes on a device, its parameters uninitialized.

    Raises:
        ConfigError: the architecture, or something in its configuration, is not supported.
    """
    module = ARCHITECTURES.get(facts.architecture)
    if module is None:
        raise ConfigError(
            f"the architecture {facts.architecture} is not supported",
            hint=f"supported: {', '.join(sorted(ARCHITECTURES))}",
        )
    if facts.hf_config.get("quantization_config"):
        method = facts.hf_config["quantization_config"].get("quant_method", "unknown")
        raise ConfigError(
            f"the checkpoint is quantized ({method}), which is not supported",
            hint="use the unquantized checkpoint, or a .gguf file",
        )
    model: Model = import_module(module).build(facts, dtype, device)
    return model
