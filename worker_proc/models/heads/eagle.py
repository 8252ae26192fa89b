"""EAGLE (arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840): one Llama layer over embeddings and hidden states.

Products with two inputs side by side are computed as the sum of two products: a program has no concatenation.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.paged_attention import AttentionShape
from octavo.kernels.rope_store_kv.rotation import Rotation
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.models.base import Residual, Tables
from octavo.worker_proc.models.checkpoint import Rule, Values, renamed
from octavo.worker_proc.models.features import Features
from octavo.worker_proc.models.heads.base import DraftHead
from octavo.worker_proc.models.hf_config import optional, reject_unless, required
from octavo.worker_proc.models.layers.attention import SelfAttention
from octavo.worker_proc.models.layers.decoder import DecoderModel, PreNormLayer
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.mlp import GatedMlp
from octavo.worker_proc.models.layers.norm import RMSNorm
from octavo.worker_proc.models.layers.rotary import rotary_from_config
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.sharding import facts_of_rank

_IGNORED = [r"rotary_emb\.inv_freq$", r"^embed_tokens\.weight$", r"^t2d$"]
"""Heads are trained with the embeddings of their model, and some checkpoints have a copy of them."""
_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


class NoNorm:
    """Leaves rows as they are: the first layer of EAGLE has no norm before its attention."""

    def __call__(self, x_TD: Tensor) -> Tensor:
        """Return `x`."""
        return x_TD

    def fused_add_norm(self, x_TD: Tensor, update_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return `x + update` twice."""
        total_TD = x_TD + update_TD
        return total_TD, total_TD


@dataclass(frozen=True, slots=True, eq=False)
class EagleFirstLayer:
    """A projection of embeddings and features, and a layer over it."""

    embedded: Linear
    hidden: Linear
    layer: PreNormLayer

    def __call__(self, embedded_TD: Tensor, features_TD: Tensor, tables: Tables, attention: Attention) -> Residual:
        """See `octavo.worker_proc.models.heads.base.FirstLayer`."""
        return self.layer(Residual(self.embedded(embedded_TD) + self.hidden(features_TD)), tables, attention)


@dataclass(frozen=True, slots=True, eq=False)
class Eagle3FirstLayer:
    """A layer whose attention reads embeddings and features; the features are the residual stream."""

    embedded_norm: RMSNorm
    hidden_norm: RMSNorm
    embedded_qkv: Linear
    hidden_qkv: Linear
    output: Linear
    shape: AttentionShape
    mlp_norm: RMSNorm
    mlp: GatedMlp
    normalizes_residual: bool
    """Whether the residual stream is the normalized features."""

    def __call__(self, embedded_TD: Tensor, features_TD: Tensor, tables: Tables, attention: Attention) -> Residual:
        """See `octavo.worker_proc.models.heads.base.FirstLayer`."""
        hidden_TD, shape = self.hidden_norm(features_TD), self.shape
        residual = Residual(hidden_TD if self.normalizes_residual else features_TD)
        qkv = self.embedded_qkv(self.embedded_norm(embedded_TD)) + self.hidden_qkv(hidden_TD)
        key_width = shape.num_kv_heads * shape.head_dim
        cos_TC, sin_TC = tables
        parts = qkv.split([shape.num_heads * shape.head_dim, key_width, key_width], dim=1)
        q_TNH, k_TKH, v_TKH = (part.unflatten(1, (-1, shape.head_dim)) for part in parts)
        out_TNH = attention.run(q_TNH, k_TKH, v_TKH, 0, Rotation(cos_TC, sin_TC, None))
        residual, x_TD = residual.plus(self.output(out_TNH.flatten(1))).normalized(self.mlp_norm)
        return residual.plus(self.mlp(x_TD))


def build_eagle(facts: ModelFacts, model: DecoderModel, max_rows: int) -> tuple[DraftHead, Features]:
    """Make an EAGLE head, uninitialized, and the features that it reads.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    facts = facts_of_rank(facts, model.parameters.sharding.size)
    config, width = facts.hf_config, required(facts.hf_config, "hidden_size", int)
    has_bias = optional(config, "eagle_fc_bias", optional(config, "bias", False))
    parts = ["embedded", "hidden"]
    columns = {r"^fc\.weight$": [f"fc.{part}.weight" for part in parts]}
    rules = [_split_columns(columns), renamed({r"^fc\.bias$": "fc.embedded.bias"})]  # the bias is added once
    parameters = _parameters(facts, model, rules)
    shape = _shape(facts)
    first = EagleFirstLayer(
        Linear.new(parameters, "fc.embedded", width, width, bias=has_bias),
        Linear.new(parameters, "fc.hidden", width, width, bias=False),
        _layer(parameters, facts, 0, has_norm=False),
    )
    head = DraftHead(
        parameters,
        [shape] * facts.num_layers,
        model=model,
        first=first,
        layers=[_layer(parameters, facts, index) for index in range(1, facts.num_layers)],
        rotary=rotary_from_config(config, facts.head_dim),
        norm=None,
        output=model.logits,
        token_ids_V=None,
        max_rows=max_rows,
    )
    return head, Features()


def build_eagle3(facts: ModelFacts, model: DecoderModel, max_rows: int) -> tuple[DraftHead, Features]:
    """Make an EAGLE-3 head, uninitialized, and the features that it reads.

    Raises:
        ConfigError: something in its configuration is not supported.
    """
    facts = facts_of_rank(facts, model.parameters.sharding.size)
    config, width = facts.hf_config, required(facts.hf_config, "hidden_size", int)
    eps, has_bias = optional(config, "rms_norm_eps", 1e-6), optional(config, "attention_bias", False)
    reject_unless(config, "norm_before_fc", [False, None])
    layers = _aux_layers(config, len(model.layers))
    block = "layers.0.self_attn"
    columns = {r"^fc\.weight$": [f"fc.{index}.weight" for index in range(len(layers))]} | {
        rf"^layers\.0\.self_attn\.{part}_proj\.weight$": [
            f"{block}.{half}.{part}_proj.weight" for half in ("embedded", "hidden")
        ]
        for part in "qkv"
    }
    names = {r"^midlayer\.": "layers.0.", r"self_attn\.([qkv])_proj\.bias$": r"self_attn.embedded.\1_proj.bias"}
    parameters = _parameters(facts, model, [renamed(names), _split_columns(columns)])
    shape, inner_width = _shape(facts), required(config, "intermediate_size", int)
    combine = [Linear.new(parameters, f"fc.{index}", width, width, bias=False) for index in range(len(layers))]
    heads = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads}

    def qkv(half: str, *, bias: bool) -> Linear:
        parts = {f"{block}.{half}.{part}_proj": count * shape.head_dim for part, count in heads.items()}
        return Linear.stacked(parameters, f"{block}.{half}.qkv_proj", parts, width, bias=bias)

    first = Eagle3FirstLayer(
        RMSNorm.new(parameters, "layers.0.input_layernorm", width, eps),
        RMSNorm.new(parameters, "layers.0.hidden_norm", width, eps),
        qkv("embedded", bias=has_bias),
        qkv("hidden", bias=False),
        Linear.new(parameters, f"{block}.o_proj", shape.num_heads * shape.head_dim, width, bias=has_bias),
        shape,
        RMSNorm.new(parameters, "layers.0.post_attention_layernorm", width, eps),
        GatedMlp(parameters, "layers.0.mlp", width, inner_width),
        optional(config, "norm_before_residual", False),
    )
    num_tokens = optional(config, "draft_vocab_size", facts.vocab_size)
    is_reduced = num_tokens != facts.vocab_size
    head = DraftHead(
        parameters,
        [shape] * facts.num_layers,
        model=model,
        first=first,
        layers=[_layer(parameters, facts, index) for index in range(1, facts.num_layers)],
        rotary=rotary_from_config(config, facts.head_dim),
        norm=RMSNorm.new(parameters, "norm", width, eps),
        output=Linear.new(parameters, "lm_head", width, num_tokens, bias=False),
        token_ids_V=parameters.new("d2t", num_tokens, dtype=torch.int64) if is_reduced else None,
        max_rows=max_rows,
    )
    if not is_reduced:
        parameters.names.ignore(r"^d2t$")
    return head, Features(layers, lambda taken: _sum_of_products(combine, taken))


def _sum_of_products(linears: Sequence[Callable[[Tensor], Tensor]], inputs: Sequence[Tensor]) -> Tensor:
    first, *others = [linear(x_TD) for linear, x_TD in zip(linears, inputs, strict=True)]
    for product_TD in others:
        first = first + product_TD
    return first


def _aux_layers(config: Mapping[str, Any], num_layers: int) -> list[int]:
    """Return the layers of the model whose inputs the head reads.

    Raises:
        ConfigError: the model has no such layers.
    """
    section: dict[str, Any] = optional(config, "eagle_config", {})
    given = section.get(_AUX_LAYERS) or config.get(_AUX_LAYERS)
    layers: list[int] = list(given or (2, num_layers // 2, num_layers - 3))
    if layers != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= num_layers:
        raise ConfigError(
            f"speculative_config: the head reads the inputs of layers {layers}, of a model with {num_layers}",
            hint=f"correct eagle_config.{_AUX_LAYERS} in the head's config.json",
        )
    return layers


def _shape(facts: ModelFacts) -> AttentionShape:
    return AttentionShape(facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.head_dim**-0.5)


def _parameters(facts: ModelFacts, model: DecoderModel, rules: Sequence[Rule]) -> Parameters:
    reject_unless(facts.hf_config, "hidden_act", ["silu"])
    return Parameters(model.parameters.placement, prefixes=["model."], ignored=_IGNORED, rules=rules)


def _layer(parameters: Parameters, facts: ModelFacts, index: int, *, has_norm: bool = True) -> PreNormLayer:
    """Make a layer of Llama."""
    config, name = facts.hf_config, f"layers.{index}"
    width, inner_width = required(config, "hidden_size", int), required(config, "intermediate_size", int)
    eps, has_bias = optional(config, "rms_norm_eps", 1e-6), optional(config, "attention_bias", False)
    attention = SelfAttention(
        parameters,
        f"{name}.self_attn",
        index,
        _shape(facts),
        width,
        has_qkv_bias=has_bias or optional(config, "qkv_bias", False),
        has_output_bias=has_bias,
    )
    return PreNormLayer(
        RMSNorm.new(parameters, f"{name}.input_layernorm", width, eps) if has_norm else NoNorm(),
        attention,
        RMSNorm.new(parameters, f"{name}.post_attention_layernorm", width, eps),
        GatedMlp(parameters, f"{name}.mlp", width, inner_width),
    )


def _split_columns(parts: dict[str, list[str]]) -> Rule:
    """Split weights evenly by inputs. `parts` maps patterns to names."""

    def rule(name: str, values: Values) -> Iterator[tuple[str, Values]]:
        found = next((names for pattern, names in parts.items() if re.search(pattern, name)), None)
        if found is None:
            yield name, values
            return
        weight = values if isinstance(values, Tensor) else values.dequantized()
        if weight.shape[1] % len(found):
            raise ConfigError(
                f"{name!r} has {weight.shape[1]} columns in the checkpoint, which is no multiple of {len(found)}"
            )
        yield from zip(found, weight.chunk(len(found), dim=1), strict=True)

    return rule
