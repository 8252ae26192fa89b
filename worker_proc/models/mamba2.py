"""Mamba-2 (Dao and Gu, arXiv 2405.21060): layers with a recurrent state instead of attention, and no mlp."""

import math
from functools import partial

from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.checkpoint import renamed
from octavo.worker_proc.models.hf_config import ignore, limits, optional, reject_unless, required
from octavo.worker_proc.models.layers.decoder import DecoderModel, SingleBlockLayer, build_decoder
from octavo.worker_proc.models.layers.mamba2 import Mamba2Mixer, Mamba2Sizes, divided_projections
from octavo.worker_proc.models.layers.norm import RMSNorm
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config, width = facts.hf_config, required(facts.hf_config, "hidden_size", int)
    eps = optional(config, "layer_norm_epsilon", 1e-5)
    num_heads, _ = placement.sharding.whole_heads(facts)
    whole = Mamba2Sizes(
        num_heads=num_heads,
        head_dim=facts.head_dim,
        state_size=optional(config, "state_size", 128),
        num_groups=optional(config, "n_groups", 8),
        conv_width=optional(config, "conv_kernel", 4),
    )
    _check(facts, num_heads)
    sizes = whole.of_rank(placement.sharding.size)
    # Checkpoints converted by early versions of transformers say "embedding".
    names = renamed({r"^embeddings?\.": "embed_tokens.", r"^norm_f\.": "norm."})
    parameters = Parameters(placement, prefixes=["backbone."], rules=[names, *divided_projections(whole)])
    norm = partial(RMSNorm.new, parameters, width=width, eps=eps)

    def layer(index: int, name: str) -> SingleBlockLayer:
        has_bias = optional(config, "use_bias", False)
        mixer = Mamba2Mixer(
            parameters,
            f"{name}.mixer",
            index,
            sizes,
            width,
            eps=eps,
            has_bias=has_bias,
            has_output_bias=has_bias,
            has_conv_bias=optional(config, "use_conv_bias", True),
            dt_limits=limits(config, "time_step_limit", (0.0, math.inf)),
        )
        return SingleBlockLayer(norm(f"{name}.norm"), mixer)

    shapes, states = [None] * facts.num_layers, [sizes.state] * facts.num_layers
    return build_decoder(facts, parameters, shapes, layer, width=width, norm=norm, states=states)


def _check(facts: ModelFacts, num_heads: int) -> None:
    """Reject contradictory or unsupported values, and mark keys without effect as read.

    `num_heads`: number of heads of the undivided model.
    """
    config, width = facts.hf_config, required(facts.hf_config, "hidden_size", int)
    expansion = optional(config, "expand", 2)
    if num_heads % (num_groups := optional(config, "n_groups", 8)):
        raise ConfigError(f"config.json: {num_heads} 'num_heads' for {num_groups} 'n_groups'")
    if expansion * width != num_heads * facts.head_dim:
        raise ConfigError(
            f"config.json: 'expand' ({expansion}) times 'hidden_size' ({width}) is not 'num_heads' ({num_heads}) "
            f"times 'head_dim' ({facts.head_dim})"
        )
    reject_unless(config, "hidden_act", ["silu", "swish"])
    reject_unless(config, "rms_norm", [True])
    ignore(config, "norm_before_gate", "intermediate_size")  # in published files, and never read by transformers
    ignore(config, "num_heads")  # in the facts
    # Sums are in float32; chunks affect only speed; the others concern training.
    ignore(config, "residual_in_fp32", "chunk_size", "rescale_prenorm_residual")
    ignore(config, "time_step_rank", "time_step_min", "time_step_max", "time_step_floor")
