"""Tracks which tokens would complete a bad word of a request. Changes no logits."""

import ctypes

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class BadWords:
    """The bad words of one request, as sequences of tokens, and the end of its output.

    The addresses of the tokens never change, so that native code can keep pointers to them.

    Args:
        words: sequences of tokens, none empty.
        output: tokens output so far.
    """

    def __init__(self, words: tuple[tuple[int, ...], ...], output: list[int]) -> None:
        self._longer: dict[int, list[tuple[int, ...]]] = {}
        """Words of several tokens, by their last token but one."""
        for word in words:
            if len(word) > 1:
                self._longer.setdefault(word[-2], []).append(word)
        singles = [word[0] for word in words if len(word) == 1]
        self.ids: npt.NDArray[np.int64] = np.zeros(len(words), dtype=np.int64)
        """Token ids; the first `num_ids` must not come next."""
        self.ids[: len(singles)] = singles
        self._num_singles = len(singles)
        self._num_ids = ctypes.c_int64(len(singles))
        self._tail_length = max((len(word) - 1 for word in words), default=0)
        self._tail: tuple[int, ...] = ()
        for token_id in output[-self._tail_length :] if self._tail_length else []:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """Append a sampled token."""
        if not self._tail_length:
            return
        self._tail = (*self._tail, token_id)[-self._tail_length :]
        num_ids = self._num_singles
        for word in self._longer.get(token_id, ()):
            if self._tail[1 - len(word) :] == word[:-1]:
                self.ids[num_ids] = word[-1]
                num_ids += 1
        self._num_ids.value = num_ids

    @property
    def depends_on_output(self) -> bool:
        """Whether the forbidden tokens change with the output, because a word has several tokens."""
        return bool(self._longer)

    @property
    def num_ids(self) -> int:
        """Number of token ids that must not come next."""
        return self._num_ids.value

    @property
    def num_ids_address(self) -> int:
        """Address of that number, for native code."""
        return ctypes.addressof(self._num_ids)

    def tensor(self) -> Tensor:
        """Return a view of those tokens."""
        return torch.from_numpy(self.ids[: self.num_ids])
