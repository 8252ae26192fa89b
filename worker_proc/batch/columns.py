"""Per-slot numbers as arrays, so that a step reads and writes those of all its requests at once."""

from enum import IntFlag
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from octavo.worker_proc.batch.inputs import Ints

Int = TypeVar("Int", np.int32, np.int64)


class Trait(IntFlag):
    """What a step must do for a request besides computing and sampling."""

    TRACKS_TOKENS = 1
    """Its sampling state follows its tokens: penalties and bad words."""
    HAS_LONG_BAD_WORDS = 2
    """It has bad words of several tokens, which depend on its output."""
    REPORTS_LOGPROBS = 4
    REPORTS_PROMPT_LOGPROBS = 8
    IS_MASKED = 16
    """Its next token has a mask of its own."""
    IS_ALIGNED = 32
    """It has an `AlignmentSpec`."""
    HAS_SPEECH_RULES = 64
    """Its first token has a mask that later tokens do not have: a transcription without timestamps."""
    HAS_TIMESTAMPS = 128
    """Its mask depends on its output, and one more rule applies: a transcription with timestamps."""


class SlotColumns:
    """Arrays with one number per slot, 0 for an empty slot.

    Args:
        num_slots: number of slots of the batch.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_known_S: Ints = np.zeros(num_slots, dtype=np.int64)
        """Tokens of the request, including those that steps in flight sample."""
        self.num_prompt_S: Ints = np.zeros(num_slots, dtype=np.int64)
        self.capacity_S: Ints = np.zeros(num_slots, dtype=np.int64)
        """Tokens that its blocks have room for."""
        self.admission_S: Ints = np.zeros(num_slots, dtype=np.int64)
        """Unique number of the admission: the slot may belong to another request when a step is over."""
        self.traits_S: Ints = np.zeros(num_slots, dtype=np.int64)
        self.adapter_S: Ints = np.zeros(num_slots, dtype=np.int64)
        """Slot of its LoRA adapter plus one; 0 if it has none."""
        self.attended_S: Ints = np.zeros(num_slots, dtype=np.int64)
        """Index of the item that it attends to by cross-attention."""
        self.num_draft_tokens_S: Ints = np.zeros(num_slots, dtype=np.int64)
        """Draft tokens after the known ones, until the step that verifies them is over."""
        self.segment_S: Ints = np.zeros(num_slots, dtype=np.int64)
        """Position at which the second text of a pair begins; 0 if there is one text."""
        self.grids_end_S: Ints = np.zeros(num_slots, dtype=np.int64)
        """Position after the last image grid; see `axes.py`."""
        self.axes_shift_S: Ints = np.zeros(num_slots, dtype=np.int64)
        """Offset added to axis positions after the last grid."""
        self.spans_end_S: Ints = np.zeros(num_slots, dtype=np.int64)
        """Position after the last bidirectional span; see `spans.py`."""

    def clear(self, slot: int) -> None:
        """Set all numbers of a slot to 0."""
        for column in self._columns():
            column[slot] = 0

    def grow(self) -> None:
        """Make room for twice as many slots."""
        for name, column in vars(self).items():
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))

    def _columns(self) -> list[npt.NDArray[Any]]:
        return list(vars(self).values())


def with_doubled_rows(table: npt.NDArray[Int]) -> npt.NDArray[Int]:
    """Return a table with twice as many rows; the new rows are zeros."""
    grown = np.zeros((2 * len(table), table.shape[1]), dtype=table.dtype)
    grown[: len(table)] = table
    return grown
