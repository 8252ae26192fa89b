"""`SpeechMask`: the tokens that `SpeechRules` allow next, for one request. Changes no logits."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.kernels.token_mask.bits import WORD_BITS, unpack_mask
from octavo.protocol.speech_rules import SpeechRules


class SpeechMask:
    """Tokens that may come next. The mask stays at its address, so that native code can keep a pointer to it.

    Args:
        rules: timestamp rules of the request.
        output: tokens output so far.
        vocab_size: vocabulary size of the model.
        allowed_W: mask of tokens that may be drawn at all, packed by `pack_mask`; `None` if all may be.
    """

    def __init__(self, rules: SpeechRules, output: list[int], vocab_size: int, allowed_W: Tensor | None) -> None:
        num_words = -(-vocab_size // WORD_BITS)
        self._rules = rules
        self._always: npt.NDArray[np.bool_] = np.zeros(num_words * WORD_BITS, dtype=np.bool_)
        self._always[:vocab_size] = True if allowed_W is None else unpack_mask(allowed_W, vocab_size).numpy()
        self._always[list(rules.suppressed)] = False
        self._words_W: npt.NDArray[np.int32] = np.zeros(num_words, dtype=np.int32)
        self.allowed_W = torch.from_numpy(self._words_W)
        """Mask of the next draw; see `octavo.kernels.token_mask`."""
        self._tail: tuple[int, ...] = ()
        """The last two tokens."""
        self._last_timestamp = -1
        for token_id in output:
            self._append(token_id)
        self._write()

    @property
    def after_first_W(self) -> Tensor:
        """Mask of all draws but the first, without timestamps."""
        return torch.from_numpy(_packed(self._always))

    def add(self, token_id: int) -> None:
        """Append a sampled token."""
        is_first = not self._tail
        self._append(token_id)
        if is_first or self._rules.first_timestamp:
            self._write()

    def _append(self, token_id: int) -> None:
        self._tail = (*self._tail, token_id)[-2:]
        if self._is_timestamp(token_id):
            self._last_timestamp = token_id

    def _is_timestamp(self, token_id: int) -> bool:
        return 0 < self._rules.first_timestamp <= token_id

    def _write(self) -> None:
        allowed = self._always.copy()
        if not self._tail:
            allowed[list(self._rules.suppressed_first)] = False
        if self._rules.first_timestamp:
            self._mask_timestamps(allowed)
        self._words_W[:] = _packed(allowed)

    def _mask_timestamps(self, allowed: npt.NDArray[np.bool_]) -> None:
        rules, first = self._rules, self._rules.first_timestamp
        if not self._tail:
            allowed[:first] = False
            if rules.max_initial_timestamp >= 0:
                allowed[first + rules.max_initial_timestamp + 1 :] = False
            return
        ends_with_timestamp = self._is_timestamp(self._tail[-1])
        begins_segment = ends_with_timestamp and (len(self._tail) < 2 or self._is_timestamp(self._tail[-2]))
        if begins_segment:
            allowed[first:] = False
        elif ends_with_timestamp:
            allowed[: rules.end] = False
        if self._last_timestamp >= 0:
            # The timestamp that ends a segment may begin the next one; otherwise time must advance.
            next_timestamp = self._last_timestamp + (not (ends_with_timestamp and not begins_segment))
            allowed[first:next_timestamp] = False


def _packed(allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    return np.packbits(allowed, bitorder="little").view(np.int32)
