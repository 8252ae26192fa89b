"""Decoders in the form of Llama, which differ only in their attention or mlp blocks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Unpack

from torch import Tensor

from octavo.kernels.paged_attention import AttentionShape
from octavo.protocol.config.facts import ModelFacts
from octavo.worker_proc.models.base import Norm
from octavo.worker_proc.models.checkpoint import Rule
from octavo.worker_proc.models.hf_config import required
from octavo.worker_proc.models.layers.decoder import (
    AttentionBlock,
    DecoderModel,
    DecoderOptions,
    MlpBlock,
    PreNormLayer,
    build_decoder,
)
from octavo.worker_proc.models.layers.norm import RMSNorm
from octavo.worker_proc.models.layers.rotary import rotary_from_config
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.parallel.placement import Placement


def llama_parameters(placement: Placement, *, ignored: Sequence[str] = (), rules: Sequence[Rule] = ()) -> Parameters:
    """Return the parameters of a model with Llama's tensor names; see `Parameters`."""
    return Parameters(placement, prefixes=["model."], ignored=[r"rotary_emb\.inv_freq$", *ignored], rules=rules)


def prenorm_decoder(
    facts: ModelFacts,
    parameters: Parameters,
    shapes: Sequence[AttentionShape | None],
    attention: Callable[[int, str], AttentionBlock],
    mlp: Callable[[int, str], MlpBlock],
    *,
    eps: float,
    norm: Callable[[str], Norm] | None = None,
    is_tied: bool | None = None,
    after_block: Callable[[Tensor], Tensor] | None = None,
    **options: Unpack[DecoderOptions],
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
        is_tied: see `build_decoder`.
        after_block: applied to the output of every block.
        options: see `DecoderModel`. `rotaries` is by default the one of the configuration, over the whole head.
    """
    width = required(facts.hf_config, "hidden_size", int)
    norm = norm or partial(RMSNorm.new, parameters, width=width, eps=eps)
    if "rotaries" not in options:
        options["rotaries"] = [rotary_from_config(facts.hf_config, facts.head_dim)]

    def layer(index: int, name: str) -> PreNormLayer:
        return PreNormLayer(
            norm(f"{name}.input_layernorm"),
            attention(index, name),
            norm(f"{name}.post_attention_layernorm"),
            mlp(index, name),
            after_attention=after_block,
            after_mlp=after_block,
        )

    return build_decoder(facts, parameters, shapes, layer, width=width, norm=norm, is_tied=is_tied, **options)
