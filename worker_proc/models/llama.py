"""The Llama family: one decoder with small differences, all of which are in this file."""

from collections.abc import Sequence

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.config.pooling import is_computed_whole
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.checkpoint import Rule, grouped_qkv, renamed, split_rows
from octavo.worker_proc.models.hf_config import ignore, optional, reject_unless, required, windows_of_layers
from octavo.worker_proc.models.layers.activation import GATED, PLAIN, activation
from octavo.worker_proc.models.layers.attention import SelfAttention, head_norm
from octavo.worker_proc.models.layers.decoder import DecoderModel, MlpBlock
from octavo.worker_proc.models.layers.mlp import GatedMlp, Mlp
from octavo.worker_proc.models.layers.prenorm import llama_parameters, prenorm_decoder
from octavo.worker_proc.models.layers.rotary import rotary_from_config
from octavo.worker_proc.parallel.placement import Placement

_INTERNLM2_NAMES = {
    r"^tok_embeddings\.": "embed_tokens.",
    r"^output\.": "lm_head.",
    r"\.attention\.wo\.": ".self_attn.o_proj.",
    r"\.attention\.": ".self_attn.",
    r"\.feed_forward\.w1\.": ".mlp.gate_proj.",
    r"\.feed_forward\.w2\.": ".mlp.down_proj.",
    r"\.feed_forward\.w3\.": ".mlp.up_proj.",
    r"\.attention_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.",
}


def build(facts: ModelFacts, placement: Placement) -> DecoderModel:
    """Make the member of the family that `facts` describes, or one rank's part of it.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    config, member = facts.hf_config, facts.architecture.removesuffix("ForCausalLM")
    bias_key = "bias" if member.startswith("InternLM") else "attention_bias"
    has_bias = member != "Qwen2" and optional(config, bias_key, False)
    has_qkv_bias = member == "Qwen2" or optional(config, "qkv_bias", has_bias)
    has_mlp_bias = optional(config, "mlp_bias", member == "InternLM3" and has_bias)
    width, inner_width = required(config, "hidden_size", int), required(config, "intermediate_size", int)
    eps = optional(config, "rms_norm_eps", 1e-5 if member == "Arcee" else 1e-6)
    is_gated = member != "Arcee"
    function = activation(config, "silu", GATED) if is_gated else activation(config, "relu2", PLAIN)
    rotates = _rotates(facts, member)
    shapes = _shapes(facts, _windows(facts, member, rotates))
    parameters = llama_parameters(placement, rules=_rules(facts, member, placement))

    def attention(index: int, name: str) -> SelfAttention:
        block = f"{name}.self_attn"
        return SelfAttention(
            parameters,
            block,
            index,
            shapes[index],
            width,
            rotary=0 if rotates[index] else None,
            has_qkv_bias=has_qkv_bias,
            has_output_bias=has_bias,
            qk_norm=head_norm(parameters, block, facts.head_dim, eps) if member == "Qwen3" else None,
        )

    def mlp(_: int, name: str) -> MlpBlock:
        make = GatedMlp if is_gated else Mlp
        return make(parameters, f"{name}.mlp", width, inner_width, activation=function, has_bias=has_mlp_bias)

    default_theta = 2000000.0 if member == "SmolLM3" else 10000.0
    return prenorm_decoder(
        facts,
        parameters,
        shapes,
        attention,
        mlp,
        eps=eps,
        is_tied=optional(config, "tie_word_embeddings", member == "SmolLM3"),
        rotaries=[rotary_from_config(config, facts.head_dim, default_theta=default_theta)],
    )


def _shapes(facts: ModelFacts, windows: Sequence[int | None]) -> list[AttentionShape]:
    ignore(facts.hf_config, "pooling")  # of LlamaBidirectionalModel: the facts have it
    heads, is_causal = (facts.num_heads, facts.num_kv_heads, facts.head_dim), not is_computed_whole(facts)
    if not is_causal and any(windows):
        raise ConfigError(
            "config.json: attention in both directions with 'sliding_window' is not supported",
            hint="if no layer has a window, run with --hf-overrides '{\"use_sliding_window\": false}'",
        )
    return [AttentionShape(*heads, facts.head_dim**-0.5, window, is_causal=is_causal) for window in windows]


def _rules(facts: ModelFacts, member: str, placement: Placement) -> list[Rule]:
    """Return the rules for names and rows of the checkpoint that differ from Llama's."""
    match member:
        case "Arcee":
            return [renamed({r"\.up_proj\.": ".fc1.", r"\.down_proj\.": ".fc2."})]
        case "InternLM2":
            rows = grouped_qkv(*placement.sharding.whole_heads(facts), facts.head_dim)
            return [renamed(_INTERNLM2_NAMES), split_rows("wqkv", rows)]
        case _:
            return []


def _rotates(facts: ModelFacts, member: str) -> list[bool]:
    """Return which layers rotate queries and keys: all, or for SmolLM3 by default all but every fourth."""
    for key in ("use_mrope", "rope_interleaved"):
        reject_unless(facts.hf_config, key, [False, None])
    if member != "SmolLM3":
        return [True] * facts.num_layers
    period = optional(facts.hf_config, "no_rope_layer_interval", 4)
    implied = [int((layer + 1) % period != 0) for layer in range(facts.num_layers)]
    return [bool(rotates) for rotates in optional(facts.hf_config, "no_rope_layers", implied)]


def _windows(facts: ModelFacts, member: str, rotates: list[bool]) -> list[int | None]:
    """Return the sliding window of each layer."""
    config, num_layers = facts.hf_config, facts.num_layers
    full, sliding = ["full_attention"] * num_layers, ["sliding_attention"] * num_layers
    if member in ("Mistral", "Ministral"):
        # In their configurations a missing key means 4096, and null means no window.
        window = config.get("sliding_window", 4096)
        return windows_of_layers(config, num_layers, window, full if window is None else sliding)
    if member not in ("Qwen2", "Qwen3", "SmolLM3"):
        return windows_of_layers(config, num_layers, None, full)
    window, first = config.get("sliding_window"), optional(config, "max_window_layers", 28)
    if not optional(config, "use_sliding_window", False):  # published configurations contain a window even so
        return windows_of_layers(config, num_layers, None, full)
    implied = full[:first] + sliding[first:]
    if member == "SmolLM3":
        implied = ["full_attention" if is_rotated else "sliding_attention" for is_rotated in rotates]
    return windows_of_layers(config, num_layers, window, implied)
