"""Fills adapter slots from host memory, as plans say. The most recently used adapters stay in host memory."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from octavo.protocol.adapters import Adapter, AdapterFault, AdapterLoad
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.lora.checkpoint import read_adapter
from octavo.worker_proc.lora.slots import AdapterSlots, PlacedAdapter
from octavo.worker_proc.models.base import Model

logger = logging.getLogger(__name__)

AllLoaded = Callable[[bool], bool]
"""Given whether this rank succeeded, returns whether all ranks of this stage and of earlier stages did. All ranks call
it in the same order."""


def open_adapters(model: Model, config: ResolvedConfig) -> "AdapterLoader":
    """Make the slots of a packed model, and the loader that fills them.

    Raises:
        ConfigError: the model or its settings do not support adapters.
    """
    assert config.lora is not None, "an engine without adapters"
    if config.enable_tp_invariant_inference and model.library is None:
        raise ConfigError(
            "--enable-tp-invariant-inference: without native kernels, sums of adapters depend on the number of ranks",
            hint="leave --enable-lora or --enable-tp-invariant-inference out",
        )
    group, stages, device = model.parameters.group, model.exchange, model.device

    def all_loaded(is_loaded: bool) -> bool:
        if group is not None:
            failures_11 = torch.full((1, 1), float(not is_loaded), device=device)
            is_loaded = float(group.all_reduce(failures_11, None, torch.float32)) == 0.0
        return is_loaded if stages is None else stages.all_succeeded(is_loaded)

    slots = AdapterSlots(model, config.lora, is_tp_invariant=config.enable_tp_invariant_inference)
    return AdapterLoader(slots, config.lora.max_cpu_loras, all_loaded)


class AdapterLoader:
    """Loads adapters between steps.

    A failed load leaves its slot empty on every rank of its stage and of later stages. The last stage reports the
    failure. No request uses the adapter that earlier stages still have in the slot.

    Args:
        slots: slots of the model's layers.
        max_cpu_loras: most adapters in host memory, including those in slots.
        all_loaded: combines the success of all ranks; by default this is the only rank.
    """

    def __init__(self, slots: AdapterSlots, max_cpu_loras: int, all_loaded: AllLoaded = bool) -> None:
        self._slots = slots
        self._max_cpu_loras = max_cpu_loras
        self._all_loaded = all_loaded
        self._placed: OrderedDict[str, PlacedAdapter] = OrderedDict()
        """Adapters by digest, in order of use; the most recently used one is last."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots on the device."""
        return self._slots.num_bytes

    def move_to(self, model: Model) -> None:
        """Change another model with the same layers from now on. The present model has no weights any more."""
        new_of = self._slots.move_to(model)
        for digest, placed in self._placed.items():
            self._placed[digest] = {new_of[layer]: parts for layer, parts in placed.items()}

    def apply(self, loads: Sequence[AdapterLoad]) -> list[AdapterFault]:
        """Execute the loads of a plan in order. Return those that failed."""
        return [fault for load in loads if (fault := self._load(load)) is not None]

    def _load(self, load: AdapterLoad) -> AdapterFault | None:
        message, adapter = "", load.adapter
        self._slots.clear(load.slot)
        placed = None
        try:
            placed = self._placed_adapter(adapter)
        except (ConfigError, MemoryError) as error:
            message = f"{error} ({error.hint})" if isinstance(error, ConfigError) and error.hint else str(error)
        if not self._all_loaded(placed is not None):
            message = message or f"another worker could not load the adapter {adapter.name!r}; its log says why"
        if message or placed is None:
            logger.error("adapter %s was not loaded into slot %d: %s", adapter.name, load.slot, message)
            return AdapterFault(load.slot, adapter.digest, message)
        self._slots.put(load.slot, placed)
        logger.info("adapter %s (%s) is in slot %d", adapter.name, adapter.digest[:12], load.slot)
        return None

    def _placed_adapter(self, adapter: Adapter) -> PlacedAdapter:
        if (placed := self._placed.get(adapter.digest)) is None:
            placed = self._slots.place(read_adapter(adapter))
            self._placed[adapter.digest] = placed
        self._placed.move_to_end(adapter.digest)
        while len(self._placed) > self._max_cpu_loras:
            self._placed.popitem(last=False)
        return placed
