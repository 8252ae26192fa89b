"""Multi-token prediction: the layer after the last one of a checkpoint (DeepSeek-V3, arXiv 2412.19437, 2.2; GLM-4.5).

The family builds it as the only layer of a pipeline stage, so embeddings and output are the model's and take no memory.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from msgspec import structs
from torch import Tensor

from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.attention.base import Attention
from octavo.worker_proc.models.base import Layer, Residual, Tables
from octavo.worker_proc.models.checkpoint import Values
from octavo.worker_proc.models.features import Features
from octavo.worker_proc.models.heads.base import DraftHead
from octavo.worker_proc.models.hf_config import optional, required
from octavo.worker_proc.models.layers.decoder import DecoderModel
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.norm import RMSNorm
from octavo.worker_proc.models.registry import build_model
from octavo.worker_proc.parallel.stages import Stage

ARCHITECTURES = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")
_OWN = "model.layers.0."
_SHARED = ("embed_tokens.", "shared_head.head.")
"""Copies of weights of the model."""


@dataclass(frozen=True, slots=True, eq=False)
class MtpFirstLayer:
    """A projection of the norms of embeddings and features, and a layer over it."""

    embedded_norm: RMSNorm
    hidden_norm: RMSNorm
    embedded: Linear
    hidden: Linear
    layer: Layer

    def __call__(self, embedded_TD: Tensor, features_TD: Tensor, tables: Tables, attention: Attention) -> Residual:
        """See `octavo.worker_proc.models.heads.base.FirstLayer`."""
        projected_TD = self.embedded(self.embedded_norm(embedded_TD)) + self.hidden(self.hidden_norm(features_TD))
        return self.layer(Residual(projected_TD), tables, attention)


def build_mtp(facts: ModelFacts, model: DecoderModel, max_rows: int) -> tuple[DraftHead, Features]:
    """Make the first layer after the last one, uninitialized, and the features that it reads.

    Raises:
        ConfigError: the model has no such layer, or not of a known layout.
    """
    if facts.architecture not in ARCHITECTURES:
        raise ConfigError(
            f"the layout of MTP layers of {facts.architecture} is not known", hint=f"one of {', '.join(ARCHITECTURES)}"
        )
    config = facts.hf_config
    width, eps = required(config, "hidden_size", int), optional(config, "rms_norm_eps", 1e-6)
    alone = {**config, "num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
    placement = replace(model.parameters.placement, stage=Stage(range(1), is_first=False, is_last=False))
    stage = build_model(structs.replace(facts, num_layers=1, hf_config=alone), placement)
    assert isinstance(stage, DecoderModel), "the family of the model"
    parameters = stage.parameters

    def norm(name: str) -> RMSNorm:
        return RMSNorm.new(parameters, f"layers.0.{name}", width, eps)

    first = MtpFirstLayer(
        norm("enorm"),
        norm("hnorm"),
        Linear.new(parameters, "layers.0.eh_proj.embedded", width, width, bias=False),
        Linear.new(parameters, "layers.0.eh_proj.hidden", width, width, bias=False),
        stage.layers[0],
    )
    head = DraftHead(
        parameters,
        [stage.cache_groups[0].shape],
        model=model,
        first=first,
        layers=[],
        rotary=stage.rotaries[0],
        norm=norm("shared_head.norm"),
        output=model.logits,
        token_ids_V=None,
        max_rows=max_rows,
    )
    return head, Features()


def is_of_mtp(facts: ModelFacts, name: str) -> bool:
    """Return whether the head has this tensor of the checkpoint."""
    prefix = f"model.layers.{facts.num_layers}."
    return name.startswith(prefix) and not name.removeprefix(prefix).startswith(_SHARED)


def own_weights(facts: ModelFacts, weights: Iterable[tuple[str, Values]]) -> Iterator[tuple[str, Values]]:
    """Yield the tensors of the head under the names of its only layer."""
    prefix = f"model.layers.{facts.num_layers}."
    for full_name, values in weights:
        if not is_of_mtp(facts, full_name):
            continue
        name = full_name.replace(prefix, _OWN, 1)
        if name == f"{_OWN}eh_proj.weight":
            weight = values if isinstance(values, Tensor) else values.dequantized()
            for part, columns in zip(("embedded", "hidden"), weight.chunk(2, dim=1), strict=True):
                yield f"{_OWN}eh_proj.{part}.weight", columns
        else:
            yield name, values
