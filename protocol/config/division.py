"""Checks whether the ranks of tensor parallelism can divide a model: pure arithmetic on its sizes."""

from collections.abc import Mapping
from typing import Any

from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError

_MLP_SIZES = (
    "intermediate_size",
    "intermediate_size_mlp",
    "ffn_dim",
    "n_inner",
    "ffn_hidden_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
)
"""Keys of `config.json` with the columns of the MLP activation."""
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of `config.json` with the number of experts. A mixture of experts has one of them."""

_STATES = {
    "Mamba2ForCausalLM": (("num_heads", 128), ("n_groups", 8)),
    "GraniteMoeHybridForCausalLM": (("mamba_n_heads", 128), ("mamba_n_groups", 1)),
    "FalconH1ForCausalLM": (("mamba_n_heads", 128), ("mamba_n_groups", 1)),
    "NemotronHForCausalLM": (("mamba_num_heads", 128), ("n_groups", 8)),
    "Qwen3NextForCausalLM": (("linear_num_value_heads", 32), ("linear_num_key_heads", 16)),
}
"""Keys of `config.json` with the heads of recurrent layers and with the groups of heads that share inputs, and
defaults."""
_CONVOLUTIONS = ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM")
"""Architectures whose recurrent layers are convolutions of each channel."""


def check_division(facts: ModelFacts, size: int) -> None:
    """Check that `size` ranks can divide a model.

    Raises:
        ConfigError: heads or columns cannot be divided evenly. The hint lists valid sizes.
    """
    if problem := division_problem(facts, size):
        sizes = [str(other) for other in range(1, facts.num_heads + 1) if not division_problem(facts, other)]
        raise ConfigError(f"--tensor-parallel-size {size} {problem}", hint=f"use one of {', '.join(sizes)}")


def division_problem(facts: ModelFacts, size: int) -> str | None:
    """Return why a model cannot be divided by `size`. Return None if it can."""
    if size == 1:
        return None
    heads, groups = state_heads(facts)
    for name, length in {**heads, "num_attention_heads": facts.num_heads, **mlp_sizes(facts)}.items():
        if length % size:
            return f"does not divide the model's {name} ({length})"
    for name, count in {"num_key_value_heads": facts.num_kv_heads, **groups}.items():
        if count % size and size % count:
            return f"neither divides the model's {name} ({count}) nor is a multiple of them"
    return None


def has_experts(facts: ModelFacts) -> bool:
    """Return whether a model is a mixture of experts."""
    return any(facts.hf_config.get(key) for key in _NUM_EXPERTS)


def state_heads(facts: ModelFacts) -> tuple[dict[str, int], dict[str, int]]:
    """Return what ranks divide in recurrent layers, by key in `config.json`: heads, and groups of heads.

    If there are more ranks than groups, ranks share a group.
    """
    config = facts.hf_config
    if facts.architecture in _CONVOLUTIONS:
        return {"hidden_size": int(config.get("hidden_size") or 0)}, {}
    if (keys := _STATES.get(facts.architecture)) is None:
        return {}, {}
    (heads, num_heads), (groups, num_groups) = keys
    return {heads: int(config.get(heads) or num_heads)}, {groups: int(config.get(groups) or num_groups)}


def lfm2_inner_width(config: Mapping[str, Any]) -> int:
    """Return the width of LFM2's MLP: two thirds of the configured width, times a factor, rounded up."""
    given = [config.get(key) for key in ("block_ff_dim", "intermediate_size")]
    width = next((int(length) for length in given if length), 12288)
    factor, multiple = config.get("block_ffn_dim_multiplier", 1.0), int(config.get("block_multiple_of") or 256)
    if config.get("block_auto_adjust_ff_dim") is False:
        return width
    width = int(2 * width / 3)
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


def config_of_rank(facts: ModelFacts, size: int) -> dict[str, Any]:
    """Return the keys of `config.json` with the activation columns that each of `size` ranks has."""
    config = {**facts.hf_config, **{key: length // size for key, length in mlp_sizes(facts).items()}}
    return {**config, "block_auto_adjust_ff_dim": False} if facts.architecture == "Lfm2ForCausalLM" else config


def mlp_sizes(facts: ModelFacts) -> dict[str, int]:
    """Return the activation columns by their key in `config.json`."""
    config = facts.hf_config
    if facts.architecture == "Lfm2ForCausalLM":
        return {"block_ff_dim": lfm2_inner_width(config)}
    if sizes := {key: int(config[key]) for key in _MLP_SIZES if config.get(key)}:
        return sizes
    # The default of GPT-2, MPT, BLOOM and Falcon.
    key = "hidden_size" if config.get("model_type") in ("bloom", "falcon") else "d_model"
    width = config.get("n_embd") or config.get(key)
    return {"n_inner": 4 * int(width)} if width else {}
