"""Decoders in the form of Llama, whose layers differ in their attention or mlp blocks only."""

from collections.abc import Callable, Sequence

from torch import Tensor

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.hf_config import optional, required
from octavo.worker_proc.models.layers.decoder import AttentionBlock, DecoderModel, MlpBlock, PreNormLayer
from octavo.worker_proc.models.layers.embedding import TokenEmbedding
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.norm import RMSNorm
from octavo.worker_proc.models.layers.rotary import Rotary, rotary_from_config
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement


def llama_parameters(facts: ModelFacts, placement: Placement, *, ignored: Sequence[str] = ()) -> Parameters:
    """Return the parameters of a model with Llama's names of tensors; `ignored`: further patterns of names."""
    is_tied = optional(facts.hf_config, "tie_word_embeddings", False)
    tables = [r"rotary_emb\.inv_freq$", *ignored]
    return Parameters(placement, prefixes=["model."], ignored=[*tables, r"^lm_head\.weight$"] if is_tied else tables)


def prenorm_decoder(
    facts: ModelFacts,
    parameters: Parameters,
    shapes: Sequence[AttentionShape],
    attention: Callable[[int, str], AttentionBlock],
    mlp: Callable[[int, str], MlpBlock],
    *,
    eps: float,
    rotaries: Sequence[Rotary] | None = None,
    after_embedding: Callable[[Tensor], Tensor] | None = None,
    after_block: Callable[[Tensor], Tensor] | None = None,
    after_output: Callable[[Tensor], Tensor] | None = None,
) -> DecoderModel:
    """Make a decoder of blocks that are given the index and the name of their layer.

    Args:
        facts: of the model, or of a rank's part of it.
        parameters: of the model, from `llama_parameters`.
        shapes: of the attention of each layer.
        attention: makes the attention block of a layer.
        mlp: makes the mlp block of a layer.
        eps: of all norms.
        rotaries: None: the one of the configuration, over the whole head.
        after_embedding: see `DecoderModel`.
        after_block: applied to the output of every block.
        after_output: see `DecoderModel`.
    """
    config, width = facts.hf_config, required(facts.hf_config, "hidden_size", int)

    def layer(index: int) -> PreNormLayer:
        name = f"layers.{index}"
        return PreNormLayer(
            RMSNorm.new(parameters, f"{name}.input_layernorm", width, eps),
            attention(index, name),
            RMSNorm.new(parameters, f"{name}.post_attention_layernorm", width, eps),
            mlp(index, name),
            after_attention=after_block,
            after_mlp=after_block,
        )

    embedding = TokenEmbedding(parameters, "embed_tokens.weight", facts.vocab_size, width)
    return DecoderModel(
        parameters,
        shapes,
        embedding=embedding,
        layers=[layer(index) for index in range(facts.num_layers)],
        norm=RMSNorm.new(parameters, "norm", width, eps),
        output=(
            Linear.tied(parameters, embedding.table_VD)
            if optional(config, "tie_word_embeddings", False)
            else Linear.new(parameters, "lm_head", width, facts.vocab_size, bias=False)
        ),
        rotaries=[rotary_from_config(config, facts.head_dim)] if rotaries is None else rotaries,
        after_embedding=after_embedding,
        after_output=after_output,
    )
