"""Decoders in the form of Llama, which differ only in their attention or mlp blocks."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.cache.groups import StateShape
from octavo.worker_proc.models.base import Norm
from octavo.worker_proc.models.checkpoint import Rule
from octavo.worker_proc.models.hf_config import optional, required
from octavo.worker_proc.models.layers.decoder import (
    AttentionBlock,
    DecoderModel,
    MlpBlock,
    PreNormLayer,
    embedding_and_output,
)
from octavo.worker_proc.models.layers.norm import RMSNorm
from octavo.worker_proc.models.layers.query_scale import QueryScale
from octavo.worker_proc.models.layers.rotary import Rotary, rotary_from_config
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement


def llama_parameters(
    facts: ModelFacts,
    placement: Placement,
    *,
    ignored: Sequence[str] = (),
    rules: Sequence[Rule] = (),
    is_tied: bool | None = None,
) -> Parameters:
    """Return the parameters of a model with Llama's tensor names.

    Args:
        facts: facts of the model.
        placement: placement of all parameters.
        ignored: further patterns of names to ignore.
        rules: see `Parameters`.
        is_tied: whether embedding and output share a weight; `None` means as the configuration says.
    """
    tables = [r"rotary_emb\.inv_freq$", *ignored]
    if _is_tied(facts, is_tied):
        tables.append(r"^lm_head\.weight$")
    return Parameters(placement, prefixes=["model."], ignored=tables, rules=rules)


# long: arguments take a line each
def prenorm_decoder(
    facts: ModelFacts,
    parameters: Parameters,
    shapes: Sequence[AttentionShape | None],
    attention: Callable[[int, str], AttentionBlock],
    mlp: Callable[[int, str], MlpBlock],
    *,
    eps: float,
    norm: Callable[[str], Norm] | None = None,
    states: Sequence[StateShape | None] = (),
    is_tied: bool | None = None,
    rotaries: Sequence[Rotary] | None = None,
    after_embedding: Callable[[Tensor], Tensor] | None = None,
    after_block: Callable[[Tensor], Tensor] | None = None,
    after_output: Callable[[Tensor], Tensor] | None = None,
    is_embedding_scaled: bool = False,
    query_scale: QueryScale | None = None,
) -> DecoderModel:
    """Make a decoder from blocks. The functions that make blocks get the index and the name of the layer.

    Args:
        facts: facts of the model, or of a rank's part of it.
        parameters: parameters of the model, from `llama_parameters`.
        shapes: shape of the attention of each layer; `None` for a layer without attention.
        attention: makes the attention block of a layer.
        mlp: makes the mlp block of a layer.
        eps: epsilon of all norms.
        norm: makes a norm, given its name; `None` means root-mean-square norms in the model's type.
        states: state shapes of layers with a recurrence; see `Model`.
        is_tied: whether embedding and output share a weight; `None` means as the configuration says.
        rotaries: rotary embeddings; `None` means the one of the configuration, over the whole head.
        after_embedding: see `DecoderModel`.
        after_block: applied to the output of every block.
        after_output: see `DecoderModel`.
        is_embedding_scaled: see `DecoderModel`.
        query_scale: see `DecoderModel`.
    """
    config, width = facts.hf_config, required(facts.hf_config, "hidden_size", int)
    norm = norm or partial(RMSNorm.new, parameters, width=width, eps=eps)

    def layer(index: int) -> PreNormLayer:
        name = f"layers.{index}"
        return PreNormLayer(
            norm(f"{name}.input_layernorm"),
            attention(index, name),
            norm(f"{name}.post_attention_layernorm"),
            mlp(index, name),
            after_attention=after_block,
            after_mlp=after_block,
        )

    embedding, output = embedding_and_output(parameters, facts, width, is_tied=_is_tied(facts, is_tied))
    return DecoderModel(
        parameters,
        shapes,
        embedding=embedding,
        layers=[layer(index) for index in range(facts.num_layers)],
        norm=norm("norm"),
        output=output,
        rotaries=[rotary_from_config(config, facts.head_dim)] if rotaries is None else rotaries,
        states=states,
        after_embedding=after_embedding,
        after_output=after_output,
        is_embedding_scaled=is_embedding_scaled,
        query_scale=query_scale,
    )


def _is_tied(facts: ModelFacts, is_tied: bool | None) -> bool:
    return optional(facts.hf_config, "tie_word_embeddings", False) if is_tied is None else is_tied
