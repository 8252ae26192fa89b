"""`LiveModel`: the model of a worker, whose weights are updated, offloaded and restored between steps.

Runs no steps. A command about weights that fails returns the reason, and the worker continues.
"""

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.memory import give_back_pages
from octavo.protocol.config import ModelFacts, ResolvedConfig
from octavo.protocol.config.speculation import ResolvedSpeculation
from octavo.protocol.errors import ProtocolError, StartupError
from octavo.protocol.worker_commands import LoadWeights
from octavo.worker_proc.device.cpu import freed_memory_returns, give_back_freed_memory
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.registry import build_model
from octavo.worker_proc.weights.heads import check_head, load_head
from octavo.worker_proc.weights.load import packer_of
from octavo.worker_proc.weights.transfer import WeightReceiver
from octavo.worker_proc.weights.update import (
    Update,
    WeightStore,
    check_update,
    load_update,
    overwrite,
    overwrite_head,
    read_new_head,
)
from octavo.worker_proc.weights.update_source import Broadcast, Checkpoint, Source, facts_of_update

logger = logging.getLogger(__name__)

Adopt = Callable[[Model | None], None]
"""Called with the model to compute with from now on, or `None` to drop every reference to the present one."""

_CPU = torch.device("cpu")


class LiveModel:
    """One rank's model. Its memory is released and allocated again on command.

    Args:
        config: engine configuration.
        model: model with loaded weights.
        adopt: called when another model object replaces the present one.
        receiver: receives weights that a trainer broadcasts.
    """

    def __init__(self, config: ResolvedConfig, model: Model, adopt: Adopt, receiver: WeightReceiver) -> None:
        self._config = config
        self._model: Model | None = model
        self._adopt = adopt
        self.receiver = receiver
        self._store: WeightStore | None = None
        """Weights while there is no model."""
        self._placement = model.parameters.placement
        self._library: NativeLibrary | None = model.library
        self._exchange = model.exchange
        self._cache_scales = model.cache_scales
        speculation = config.speculation
        self._draft_model = model.head if speculation is not None and speculation.method == "draft_model" else None
        """Draft model, if any. It keeps its weights."""
        self._towers = model.towers
        """Towers of the model. They keep their weights."""
        self._head_facts = speculation.head if speculation is not None and self._draft_model is None else None
        """Files of a draft head, which belongs to its model: a new model reads them again. `None` if there is no
        head."""
        self.stage = model.stage
        """Layers of this pipeline stage."""

    @property
    def model(self) -> Model:
        """The model. There is none between `release` and `restore`, and after a failed load."""
        if self._model is None:
            raise ProtocolError("a step was planned for a model without weights")
        return self._model

    @property
    def has_weights(self) -> bool:
        """Whether a model is loaded."""
        return self._model is not None

    @freed_memory_returns()
    @torch.inference_mode()
    def load(self, command: LoadWeights, *, in_place: bool) -> tuple[str, str]:
        """Load the weights of a checkpoint, or only check it.

        Args:
            command: what to load.
            in_place: keep all tensors at their addresses, because CUDA graphs refer to them.

        Returns:
            The reason of a failure, "" if there was none, and the digest of the checkpoint. A check that fails changes
            nothing.
        """
        if self._config.media is not None:
            return "weights of models that read images are not exchanged in this release: replace the engine", ""
        try:
            source = self._source(command)
            update = check_update(self._config, self._placement, source, is_partial=command.is_partial)
            if not self.has_weights and self._store is None and command.is_partial:
                return "there are no weights: load a whole checkpoint first", ""
            head = self._checked_head(source)
            if command.is_check:
                return "", ""
            digest = source.digest()
            if in_place and self._model is not None:
                packer = packer_of(self._config, self._placement.device, self._library)
                # Needs the memory and the files of the head before anything changes.
                new_head = None if head is None else read_new_head(self._speculation_with(head), self._model)
                overwrite(self._config, self._model, update, packer)
                if new_head is not None:
                    overwrite_head(new_head, self._model)
                    self._head_facts = head
            else:
                self._replace(update, head)
        except (StartupError, OSError, RuntimeError, MemoryError) as error:
            hint = f" ({error.hint})" if isinstance(error, StartupError) and error.hint else ""
            if not command.is_check:
                logger.exception("weights of %s: %s", command.path or "a trainer", error)
                if command.transfer is not None:
                    self.receiver.leave()  # so that the trainer and the other workers notice
            return f"{error}{hint}", ""
        return "", digest

    def _checked_head(self, source: Source) -> ModelFacts | None:
        """Return the files of the draft head that the update uses.

        Raises:
            ConfigError, OSError: the head cannot be loaded. Without this check the model would be lost.
        """
        if self._head_facts is None:
            return None
        speculation = self._speculation_with(self._head_facts)
        shapes = build_model(self._config.model, replace(self._placement, device=torch.device("meta")))
        update = source.facts if isinstance(source, Checkpoint) else self._head_facts
        return check_head(speculation, shapes, update)

    def _speculation_with(self, head: ModelFacts) -> ResolvedSpeculation:
        """Return the settings of speculative decoding with these head files."""
        assert self._config.speculation is not None, "an engine that drafts with a head"
        return msgspec.structs.replace(self._config.speculation, head=head)

    def _source(self, command: LoadWeights) -> Source:
        if command.transfer is None:
            return Checkpoint(facts_of_update(self._config, Path(command.path)))
        self.receiver.check(self._config, command.transfer)
        return Broadcast(self.receiver, command.transfer)

    @torch.inference_mode()
    def release(self, level: int) -> None:
        """Release the memory of weights: move them to host memory (level 1), or drop them (level 2).

        On a CPU, level 1 leaves weights in place, but returns pages that a file can restore to the system.
        """
        self._collect()  # frees the cache, which was released before
        if self._placement.device.type == "cpu" and level == 1:
            self._free()
            if self._model is not None:
                give_back_pages(_buffers(self._model))
            return
        if self._model is not None:
            self._store = self._take_apart()
        if level == 1 and self._store is not None:
            self._store.to(_CPU)
        else:
            self._store = None
        self._free()

    @torch.inference_mode()
    def restore(self) -> None:
        """Rebuild the model from weights in host memory. Without such weights, wait for those of a `load`."""
        if self._model is not None or self._store is None:
            return
        store, self._store = self._store, None
        store.to(self._placement.device)
        model = build_model(self._config.model, self._placement)
        model.parameters.adopt(store.tensors, store.packed)
        self._use(model, self._head_facts)

    def _replace(self, update: Update, head: ModelFacts | None) -> None:
        store = self._store
        if self._model is not None:
            store = self._take_apart()
        self._store = None
        if store is not None and self._placement.device.type != "cpu":
            store.to(self._placement.device)
        packer = packer_of(self._config, self._placement.device, self._library)
        model = load_update(self._config, self._placement, update, packer, store)
        self._use(model, head)

    def _take_apart(self) -> WeightStore:
        """Return the weights, with no other references to them."""
        model, self._model = self.model, None
        store = WeightStore.of(model)
        del model
        self._adopt(None)
        self._collect()
        return store

    def _use(self, model: Model, head: ModelFacts | None) -> None:
        model.library, model.exchange, model.head = self._library, self._exchange, self._draft_model
        model.cache_scales = self._cache_scales  # the contents of the cache were stored with these scales
        model.towers = self._towers
        if self._config.takes_rows:
            model.take_given_rows(self._config.max_num_batched_tokens, self._config.num_deeper_rows)
        if head is not None:
            speculation = self._speculation_with(head)
            load_head(speculation, model, self._config.max_num_batched_tokens, lambda fraction: None)
            self._head_facts = head
        self._model = model
        self._adopt(model)
        self._collect()

    def _collect(self) -> None:
        """Free models in reference cycles. Objects that survive are excluded from later collections."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    def _free(self) -> None:
        give_back_freed_memory()
        if self._placement.device.type == "cuda":
            torch.cuda.empty_cache()


def _buffers(model: Model) -> list[torch.Tensor]:
    """Return the memory of all weights that the native library packed."""
    buffers = []
    for packed in model.parameters.packed.values():
        native = getattr(packed.product, "packed", None)
        if native is not None:
            buffers += native.to_buffers()[1].values()
    return buffers
