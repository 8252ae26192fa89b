"""Loads the head that a model drafts with."""

from collections.abc import Callable
from functools import partial

from octavo.kernels.linear import Packer
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.config.speculation import ResolvedSpeculation, SpeculationMethod
from octavo.protocol.errors import ConfigError, StartupError
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.heads.eagle import build_eagle, build_eagle3
from octavo.worker_proc.models.heads.mtp import build_mtp, is_of_mtp, own_weights
from octavo.worker_proc.models.layers.decoder import DecoderModel
from octavo.worker_proc.weights.reader import read_weights

_BUILDERS = {"eagle": build_eagle, "eagle3": build_eagle3, "mtp": build_mtp}


def load_head(speculation: ResolvedSpeculation, model: Model, max_rows: int, report: Callable[[float], None]) -> None:
    """Give a model its head, with the weights of its checkpoint as precise as they are there.

    Args:
        speculation: method and facts of the head.
        model: with its weights.
        max_rows: of a step.
        report: called with the fraction of the weights read so far.

    Raises:
        ConfigError: the head, or one for this model, is not supported; or a tensor is missing or has another shape.
    """
    facts = speculation.head
    assert facts is not None, "an engine that drafts with a head"
    if not isinstance(model, DecoderModel):
        raise ConfigError(
            f"speculative_config: method {speculation.method} needs a model of our layers, not one of transformers",
            hint='use {"method": "suffix"}',
        )
    try:
        head, features = _BUILDERS[speculation.method](facts, model, max_rows)
        if speculation.method == "mtp":
            head.load_weights(own_weights(facts, read_weights(facts, report, partial(is_of_mtp, facts))))
        else:
            head.load_weights(read_weights(facts, report, head.parameters.wants))
    except StartupError as error:
        raise ConfigError(f"speculative_config: {facts.model_path}: {error.message}", hint=error.hint) from error
    head.pack(Packer(model.device, native=model.library))
    head.finish_loading()
    model.head, model.features = head, features


def updated_head(method: SpeculationMethod, head: ModelFacts, update: ModelFacts) -> ModelFacts:
    """Return the files of a head whose model gets the weights of a checkpoint: its own, if they have its layer.

    Args:
        method: of the head.
        head: its files so far.
        update: the checkpoint.
    """
    if method != "mtp":
        return head
    found = read_weights(update, lambda fraction: None, partial(is_of_mtp, update))
    return head if next(iter(found), None) is None else update
