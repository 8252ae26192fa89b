"""Which file implements which architecture. Importing it imports no model."""

from importlib import import_module

from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.parallel.sharding import facts_of_rank

ARCHITECTURES = {
    "DeepseekV2ForCausalLM": "octavo.worker_proc.models.deepseek",
    "DeepseekV3ForCausalLM": "octavo.worker_proc.models.deepseek",
    "GPT2LMHeadModel": "octavo.worker_proc.models.gpt2",
    "LlamaForCausalLM": "octavo.worker_proc.models.llama",
    "MistralForCausalLM": "octavo.worker_proc.models.llama",
    "MixtralForCausalLM": "octavo.worker_proc.models.mixtral",
    "OPTForCausalLM": "octavo.worker_proc.models.opt",
    "Qwen2ForCausalLM": "octavo.worker_proc.models.llama",
    "Qwen2MoeForCausalLM": "octavo.worker_proc.models.qwen_moe",
    "Qwen3ForCausalLM": "octavo.worker_proc.models.llama",
    "Qwen3MoeForCausalLM": "octavo.worker_proc.models.qwen_moe",
}
"""Architecture, as in `config.json`, to the module whose `build` makes it."""


def build_model(facts: ModelFacts, placement: Placement) -> Model:
    """Make the model that `facts` describes, or one rank's part of it. Its parameters are uninitialized.

    Raises:
        ConfigError: the architecture, or something in its configuration, is not supported, or it cannot be divided.
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
    model: Model = import_module(module).build(facts_of_rank(facts, placement.sharding.size), placement)
    return model
