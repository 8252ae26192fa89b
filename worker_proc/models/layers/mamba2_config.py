"""Reads the sizes of state-space blocks from configurations with Bamba's key names: Granite 4, Falcon-H1."""

from collections.abc import Mapping
from typing import Any

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.hf_config import ignore, optional, required
from octavo.worker_proc.models.layers.mamba2 import Mamba2Sizes


def sizes_from_config(config: Mapping[str, Any], inner_width: int) -> Mamba2Sizes:
    """Return the sizes of blocks whose heads have `inner_width` numbers in total.

    Raises:
        ConfigError: the sizes contradict each other.
    """
    ignore(config, "mamba_chunk_size")  # the recurrence has no chunks
    num_heads, num_groups = required(config, "mamba_n_heads", int), optional(config, "mamba_n_groups", 1)
    head_dim = config.get("mamba_d_head")
    if head_dim in (None, "auto"):
        head_dim = inner_width // num_heads
    if num_heads * head_dim != inner_width:
        raise ConfigError(
            f"config.json: {num_heads} 'mamba_n_heads' of {head_dim} 'mamba_d_head' are not the block's {inner_width}"
        )
    if num_heads % num_groups:
        raise ConfigError(f"config.json: {num_heads} 'mamba_n_heads' for {num_groups} 'mamba_n_groups'")
    return Mamba2Sizes(
        num_heads, head_dim, optional(config, "mamba_d_state", 256), num_groups, optional(config, "mamba_d_conv", 4)
    )
