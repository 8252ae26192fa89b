"""What a device knows of every slot: how its request is sampled, its blocks, and the token it was last given.

Filled by differences: from the states that `sampling` keeps on the host, and from plans. Samples nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.kernels.sample import RequestTable
from octavo.worker_proc.pipeline.slot_memory import Column, SlotMemory
from octavo.worker_proc.sampling.state import SamplingState

I32, I64, F32, F64 = torch.int32, torch.int64, torch.float32, torch.float64

BLOCK_IDS, LAST_TOKEN = "block_ids", "last_token"

_DEFAULTS: dict[str, tuple[float, ...]] = {
    "temperature_S": (0.0,),
    "seed_S": (0,),
    "top_k_S": (0,),
    "top_p_S": (1.0,),
    "log_min_p_S": (-math.inf,),
    "num_biases_S": (0,),
    "num_withheld_S": (0,),
    "min_tokens_S": (0,),
    "num_bad_S": (0,),
    "has_penalties_S": (0,),
    "penalties_S3": (0.0, 0.0, 0.0),
    "has_mask_S": (0,),
}
"""The numbers of a slot that never had a request: the most likely token, of unchanged logits."""
_NOT_ZERO = ("top_p_S", "log_min_p_S")


@dataclass(frozen=True, slots=True)
class Widths:
    """How long the lists of a request may be."""

    biases: int = 64
    withheld: int = 32
    bad: int = 64
    seen: int = 0
    blocks: int = 0

    def holding(self, state: SamplingState) -> "Widths":
        """Return these, or twice as large ones where the lists of a request are longer."""
        return replace(
            self,
            biases=_doubled(self.biases, state.bias_ids.numel()),
            withheld=_doubled(self.withheld, state.withheld_ids.numel()),
            bad=_doubled(self.bad, len(state.bad_words.ids) if state.bad_words else 0),
        )


class SlotTable:
    """The slots of a batch, and one more that no request has: what a step is filled up with.

    Args:
        num_slots: of the batch.
        vocab_size: of the model.
        widths: room for the lists of each.
        device: where it is.
    """

    def __init__(self, num_slots: int, vocab_size: int, widths: Widths, device: torch.device) -> None:
        self.idle_slot = num_slots
        self.widths = widths
        self._vocab_size = vocab_size
        self._memory = SlotMemory(_columns(vocab_size, widths), num_slots + 1, device)
        self.requests = RequestTable(**{name: self._memory.tensor(name) for name in RequestTable.__slots__})
        self.block_ids_SP = self._memory.tensor(BLOCK_IDS)
        self.last_token_S = self._memory.tensor(LAST_TOKEN)
        for name in _NOT_ZERO:
            self._memory.tensor(name).fill_(_DEFAULTS[name][0])
        self._said: list[dict[str, tuple[float, ...]]] = [dict(_DEFAULTS) for _ in range(num_slots)]
        """The numbers that each slot has, so that only others are sent."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns."""
        return self._memory.num_bytes

    @property
    def memory(self) -> SlotMemory:
        """Where the columns are, and the changes that wait to be sent."""
        return self._memory

    def widened(self, widths: Widths) -> "SlotTable":
        """Return a table that says the same and has room for longer lists. No change may be waiting."""
        other = SlotTable(self.idle_slot, self._vocab_size, widths, self.last_token_S.device)
        other._said = self._said
        for column in _columns(self._vocab_size, self.widths):
            target, source = other._memory.tensor(column.name), self._memory.tensor(column.name)
            (target if column.width is None else target[:, : source.shape[1]]).copy_(source)
        return other

    def admit(self, slot: int, state: SamplingState, block_ids: Sequence[int]) -> None:
        """Give a slot to a request, whose lists are not longer than the table's."""
        spec, counts, bad_words = state.spec, state.penalties, state.bad_words
        self._say(slot, "temperature_S", spec.temperature)
        self._say(slot, "seed_S", spec.seed - 2**64 if spec.seed >= 2**63 else spec.seed)
        self._say(slot, "top_k_S", spec.top_k)
        self._say(slot, "top_p_S", spec.top_p)
        self._say(slot, "log_min_p_S", math.log(spec.min_p) if spec.min_p > 0.0 else -math.inf)
        self._say(slot, "min_tokens_S", spec.min_tokens)
        self._say_list(slot, "bias_ids_SB", "num_biases_S", state.bias_ids.numpy())
        self._write(slot, "bias_values_SB", state.bias_values.numpy())
        self._say_list(slot, "withheld_ids_SE", "num_withheld_S", state.withheld_ids.numpy())
        self._say_list(slot, "bad_ids_SX", "num_bad_S", bad_words.ids[: bad_words.num_ids] if bad_words else ())
        self._say(slot, "has_penalties_S", counts is not None)
        if counts is not None:
            num_seen = counts.num_seen
            self._write(slot, "num_seen_S", [num_seen])
            self._write(slot, "seen_ids_SL", counts.seen_ids[:num_seen])
            self._write(slot, "output_counts_SL", counts.output_counts[:num_seen])
            self._say(slot, "penalties_S3", state.repetition_penalty, spec.frequency_penalty, spec.presence_penalty)
        self.set_mask(slot, state.allowed_W)
        self.append_blocks(slot, 0, block_ids)

    def append_blocks(self, slot: int, start: int, block_ids: Sequence[int]) -> None:
        """Give a slot blocks, the first of them its number `start`."""
        self._write(slot, BLOCK_IDS, block_ids, start)

    def set_mask(self, slot: int, allowed_W: Tensor | None) -> None:
        """Have the next draws of a slot bound by a mask; None: by none."""
        self._say(slot, "has_mask_S", allowed_W is not None)
        if allowed_W is not None:
            self._write(slot, "allowed_SW", allowed_W.numpy())

    def set_bad_ids(self, slot: int, state: SamplingState) -> None:
        """Keep the next draw of a slot from completing a bad word, whose words it knows since it was admitted."""
        if state.bad_words:
            self._say_list(slot, "bad_ids_SX", "num_bad_S", state.bad_words.ids[: state.bad_words.num_ids])

    def _say_list(self, slot: int, name: str, num_name: str, values: Sequence[int] | npt.NDArray[np.integer]) -> None:
        self._say(slot, num_name, len(values))
        self._write(slot, name, values)

    def _say(self, slot: int, name: str, *values: float) -> None:
        said = self._said[slot]
        if said[name] != values:
            said[name] = values
            self._memory.write(name, slot, values)

    def _write(self, slot: int, name: str, values: Sequence[float] | npt.NDArray[np.generic], start: int = 0) -> None:
        if len(values):
            self._memory.write(name, slot, values, start)


def _columns(vocab_size: int, widths: Widths) -> list[Column]:
    lists = {
        "bias_ids_SB": (I32, widths.biases),
        "bias_values_SB": (F32, widths.biases),
        "withheld_ids_SE": (I32, widths.withheld),
        "bad_ids_SX": (I32, widths.bad),
        "seen_ids_SL": (I32, widths.seen),
        "output_counts_SL": (I32, widths.seen),
        "penalties_S3": (F32, 3),
        "allowed_SW": (I32, -(-vocab_size // 32)),
        BLOCK_IDS: (I32, widths.blocks),
    }
    numbers = {
        "temperature_S": F32,
        "seed_S": I64,
        "top_k_S": I32,
        "top_p_S": F64,
        "log_min_p_S": F32,
        "num_biases_S": I32,
        "num_withheld_S": I32,
        "min_tokens_S": I32,
        "num_bad_S": I32,
        "has_penalties_S": I32,
        "num_seen_S": I32,
        "has_mask_S": I32,
        LAST_TOKEN: I64,
    }
    return [
        *(Column(name, dtype) for name, dtype in numbers.items()),
        *(Column(name, dtype, width) for name, (dtype, width) in lists.items()),
    ]


def _doubled(width: int, needed: int) -> int:
    while width < needed:
        width *= 2
    return width
