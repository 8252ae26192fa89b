"""Numbers of every slot as arrays, so that a step reads and writes those of all its requests at once."""

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
    """Its bad words depend on its output."""
    REPORTS_LOGPROBS = 4
    REPORTS_PROMPT_LOGPROBS = 8
    IS_MASKED = 16
    """Its next token has a mask of its own."""
    IS_ALIGNED = 32
    """It has an `AlignmentSpec`."""
    HAS_SPEECH_RULES = 64
    """Its first token has a mask that later ones do not have: those of a transcription without timestamps."""
    HAS_TIMESTAMPS = 128
    """Its mask depends on its output: that of a transcription with timestamps, which has one more rule."""


class SlotColumns:
    """One number per slot in each array; all are 0 for an empty slot.

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
        """A number that no other request has: a slot may be another request's when a step is over."""
        self.traits_S: Ints = np.zeros(num_slots, dtype=np.int64)
        self.adapter_S: Ints = np.zeros(num_slots, dtype=np.int64)
        """One more than the slot of its LoRA adapter; 0: it has none."""
        self.attended_S: Ints = np.zeros(num_slots, dtype=np.int64)
        """The place of the item that it attends to, with cross-attention."""
        self.num_draft_tokens_S: Ints = np.zeros(num_slots, dtype=np.int64)
        """Drafts of tokens that follow the known ones, until the step that verifies them is over."""
        self.segment_S: Ints = np.zeros(num_slots, dtype=np.int64)
        """The position at which the second text of a pair begins; 0: there is one text."""
        self.grids_end_S: Ints = np.zeros(num_slots, dtype=np.int64)
        """The position after the last grid of an image; see `axes.py`."""
        self.axes_shift_S: Ints = np.zeros(num_slots, dtype=np.int64)
        """Added to positions from there on, so that they count on from the last grid."""
        self.spans_end_S: Ints = np.zeros(num_slots, dtype=np.int64)
        """The position after the last span that attends in both directions; see `spans.py`."""

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        for column in self._columns():
            column[slot] = 0

    def grow(self) -> None:
        """Make room for twice as many slots."""
        for name, column in vars(self).items():
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))

    def _columns(self) -> list[npt.NDArray[Any]]:
        return list(vars(self).values())


def with_doubled_rows(table: npt.NDArray[Int]) -> npt.NDArray[Int]:
    """Return a table with as many rows of zeros after its own."""
    grown = np.zeros((2 * len(table), table.shape[1]), dtype=table.dtype)
    grown[: len(table)] = table
    return grown
