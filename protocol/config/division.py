"""Whether the ranks of tensor parallelism can divide a model: pure arithmetic on its sizes."""

from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError

_MLP_SIZES = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "ffn_hidden_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
"""Keys of `config.json` for the columns of the activation."""
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of `config.json`, of which a mixture of experts has one."""


def check_division(facts: ModelFacts, size: int) -> None:
    """Check that `size` ranks can divide a model.

    Raises:
        ConfigError: heads or columns cannot be divided evenly; the hint lists the sizes that can.
    """
    if problem := division_problem(facts, size):
        sizes = [str(other) for other in range(1, facts.num_heads + 1) if not division_problem(facts, other)]
        raise ConfigError(
            f"--tensor-parallel-size {size} {problem}", phase="configuration", hint=f"use one of {', '.join(sizes)}"
        )


def division_problem(facts: ModelFacts, size: int) -> str | None:
    """Return why a model cannot be divided by `size`; None: it can."""
    if size == 1:
        return None
    for name, length in {"num_attention_heads": facts.num_heads, **mlp_sizes(facts)}.items():
        if length % size:
            return f"does not divide the model's {name} ({length})"
    if facts.num_kv_heads % size and size % facts.num_kv_heads:
        return f"neither divides the model's num_key_value_heads ({facts.num_kv_heads}) nor is a multiple of them"
    return None


def has_experts(facts: ModelFacts) -> bool:
    """Return whether a model is a mixture of experts."""
    return any(facts.hf_config.get(key) for key in _NUM_EXPERTS)


def mlp_sizes(facts: ModelFacts) -> dict[str, int]:
    """Return the columns of the activation, by their key in `config.json`."""
    config = facts.hf_config
    if sizes := {key: int(config[key]) for key in _MLP_SIZES if config.get(key)}:
        return sizes
    # The default of GPT-2, MPT, BLOOM and Falcon.
    key = "hidden_size" if config.get("model_type") in ("bloom", "falcon") else "d_model"
    width = config.get("n_embd") or config.get(key)
    return {"n_inner": 4 * int(width)} if width else {}
