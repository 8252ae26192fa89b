"""StarCoder2: layer norms and a plain mlp."""

from functools import partial

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.checkpoint import renamed
from octavo.worker_proc.models.hf_config import ignore, optional, reject_unless, required, window_of_all_layers
from octavo.worker_proc.models.layers.activation import PLAIN, activation
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import DecoderModel
from octavo.worker_proc.models.layers.mlp import Mlp
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.layers.prenorm import llama_parameters, prenorm_decoder
from octavo.worker_proc.parallel.placement import Placement


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config = facts.hf_config
    ignore(config, "activation_function")  # a duplicate of hidden_act
    reject_unless(config, "norm_type", ["layer_norm"])
    reject_unless(config, "mlp_type", ["default"])
    is_tied = optional(config, "tie_word_embeddings", True)
    has_bias = optional(config, "use_bias", True)
    width, eps = required(config, "hidden_size", int), optional(config, "norm_epsilon", 1e-5)
    inner_width, function = required(config, "intermediate_size", int), activation(config, "gelu_pytorch_tanh", PLAIN)
    window = window_of_all_layers(config)
    shape = AttentionShape(facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.head_dim**-0.5, window)
    rules = [renamed({r"\.mlp\.c_fc\.": ".mlp.fc1.", r"\.mlp\.c_proj\.": ".mlp.fc2."})]
    parameters = llama_parameters(placement, rules=rules)
    return prenorm_decoder(
        facts,
        parameters,
        [shape] * facts.num_layers,
        lambda index, name: SelfAttention(
            parameters, f"{name}.self_attn", index, shape, width, has_qkv_bias=has_bias, has_output_bias=has_bias
        ),
        lambda _, name: Mlp(parameters, f"{name}.mlp", width, inner_width, activation=function, has_bias=has_bias),
        eps=eps,
        norm=partial(LayerNorm.new, parameters, width=width, eps=eps),
        is_tied=is_tied,
    )
