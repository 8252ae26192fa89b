"""Loads draft heads."""

from collections.abc import Callable
from functools import partial

from octavo.kernels.linear import Packer
from octavo.protocol.config.facts import ModelFacts
from octavo.protocol.config.speculation import ResolvedSpeculation, SpeculationMethod
from octavo.protocol.errors import ConfigError, StartupError
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.features import Features
from octavo.worker_proc.models.heads.base import DraftHead
from octavo.worker_proc.models.heads.eagle import build_eagle, build_eagle3
from octavo.worker_proc.models.heads.mtp import build_mtp, is_of_mtp, own_weights
from octavo.worker_proc.models.layers.decoder import DecoderModel
from octavo.worker_proc.weights.reader import read_weights
from octavo.worker_proc.weights.update_source import Wants, Weights, without_values

_BUILDERS = {"eagle": build_eagle, "eagle3": build_eagle3, "mtp": build_mtp}


def load_head(speculation: ResolvedSpeculation, model: Model, max_rows: int, report: Callable[[float], None]) -> None:
    """Give a model its draft head. The head's weights stay as precise as in its checkpoint.

    Args:
        speculation: method and facts of the head.
        model: model with loaded weights.
        max_rows: most rows of a step.
        report: called with the fraction of the weights read so far.

    Raises:
        ConfigError: the head is not supported, or not for this model; or a tensor is missing or has another shape.
    """
    model.head, model.features = read_head(speculation, model, max_rows, report)


def read_head(
    speculation: ResolvedSpeculation, model: Model, max_rows: int, report: Callable[[float], None]
) -> tuple[DraftHead, Features]:
    """Return a head, and the features that it reads; see `load_head`."""
    facts = speculation.head
    assert facts is not None, "an engine that drafts with a head"
    head, features = _filled(speculation.method, facts, model, max_rows, partial(read_weights, facts, report))
    head.pack(Packer(model.device, native=model.library))
    head.finish_loading()
    return head, features


def check_head(speculation: ResolvedSpeculation, model: Model, update: ModelFacts) -> ModelFacts:
    """Return the files that a head is loaded from when its model gets the weights of a checkpoint.

    Args:
        speculation: method, and facts of the present head.
        model: model on the device "meta".
        update: the checkpoint.

    Raises:
        ConfigError: `load_head` would fail.
    """
    assert speculation.head is not None, "an engine that drafts with a head"
    facts = _updated_head(speculation.method, speculation.head, update)
    try:
        _filled(speculation.method, facts, model, 1, lambda wants: without_values(read_weights(facts, _ignore, wants)))
    except ConfigError as error:
        if facts is not update:
            raise
        raise ConfigError(error.message, hint="an update has all tensors of the MTP layer, or none") from error
    return facts


def _filled(
    method: SpeculationMethod, facts: ModelFacts, model: Model, max_rows: int, read: Callable[[Wants], Weights]
) -> tuple[DraftHead, Features]:
    """Return a head with its weights, not packed, and the features that it reads."""
    if not isinstance(model, DecoderModel):
        raise ConfigError(
            f"speculative_config: method {method} needs a model of our layers, not one of transformers",
            hint='use {"method": "suffix"}',
        )
    try:
        head, features = _BUILDERS[method](facts, model, max_rows)
        if method == "mtp":
            head.load_weights(own_weights(facts, read(partial(is_of_mtp, facts))))
        else:
            head.load_weights(read(head.parameters.wants))
    except StartupError as error:
        raise ConfigError(f"speculative_config: {facts.model_path}: {error.message}", hint=error.hint) from error
    return head, features


def _updated_head(method: SpeculationMethod, head: ModelFacts, update: ModelFacts) -> ModelFacts:
    """Return the files of a head whose model gets the weights of a checkpoint: the checkpoint's, if it has the head.

    Args:
        method: speculation method of the head.
        head: files of the present head.
        update: the checkpoint.
    """
    if method != "mtp":
        return head
    found = read_weights(update, _ignore, partial(is_of_mtp, update))
    return head if next(iter(found), None) is None else update


def _ignore(fraction: float) -> None:
    """Report no progress."""
