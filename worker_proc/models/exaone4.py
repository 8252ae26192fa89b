"""EXAONE 4: norms after blocks; layers with full attention do not rotate if other layers have windows."""

from functools import partial

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.hf_config import full_attention_every, optional, required, windows_of_layers
from octavo.worker_proc.models.layers.activation import GATED, activation
from octavo.worker_proc.models.layers.attention import SelfAttention, head_norm
from octavo.worker_proc.models.layers.decoder import DecoderModel, PostNormLayer, build_decoder
from octavo.worker_proc.models.layers.mlp import GatedMlp
from octavo.worker_proc.models.layers.norm import RMSNorm
from octavo.worker_proc.models.layers.prenorm import llama_parameters
from octavo.worker_proc.models.layers.rotary import rotary_from_config
from octavo.worker_proc.parallel.placement import Placement


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the model that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config = facts.hf_config
    width, eps = required(config, "hidden_size", int), optional(config, "rms_norm_eps", 1e-5)
    inner_width, function = required(config, "intermediate_size", int), activation(config, "silu", GATED)
    window = config.get("sliding_window", 4096)
    windows = windows_of_layers(config, facts.num_layers, window, _layer_types(facts, window))
    heads = facts.num_heads, facts.num_kv_heads, facts.head_dim
    shapes = [AttentionShape(*heads, facts.head_dim**-0.5, window) for window in windows]
    parameters = llama_parameters(placement)
    norm = partial(RMSNorm.new, parameters, width=width, eps=eps)

    def layer(index: int, name: str) -> PostNormLayer:
        attention = SelfAttention(
            parameters,
            f"{name}.self_attn",
            index,
            shapes[index],
            width,
            rotary=0 if window is None or windows[index] is not None else None,
            qk_norm=head_norm(parameters, f"{name}.self_attn", facts.head_dim, eps),
        )
        return PostNormLayer(
            attention,
            norm(f"{name}.post_attention_layernorm"),
            GatedMlp(parameters, f"{name}.mlp", width, inner_width, activation=function),
            norm(f"{name}.post_feedforward_layernorm"),
        )

    rotaries = [rotary_from_config(config, facts.head_dim)]
    return build_decoder(facts, parameters, shapes, layer, width=width, norm=norm, rotaries=rotaries)


def _layer_types(facts: ModelFacts, window: int | None) -> list[str]:
    """Return the types of the layers for a configuration without `layer_types`: a pattern such as "LLLG", or a period.

    Raises:
        ConfigError: the pattern is neither.
    """
    pattern, num_layers = facts.hf_config.get("sliding_window_pattern", 4), facts.num_layers
    if window is None or not pattern:
        return ["full_attention"] * num_layers
    if isinstance(pattern, int):
        return full_attention_every(pattern, num_layers)
    kinds = {"L": "sliding_attention", "G": "full_attention"}
    if not isinstance(pattern, str) or set(pattern) - set(kinds):
        raise ConfigError(f"config.json: 'sliding_window_pattern' is {pattern!r}; expected a number or letters L and G")
    # The last layer has full attention, whatever its letter says.
    return [kinds[pattern[layer % len(pattern)]] for layer in range(num_layers - 1)] + ["full_attention"]
