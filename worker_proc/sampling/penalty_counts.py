"""Counts a request's tokens for its penalties. Applies none."""

import ctypes
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class PenaltyCounts:
    """The tokens of a request's prompt and output, each once, with the number of times it was output.

    Only requests with penalties have one. There is one entry per distinct token seen, not per token of the vocabulary.
    The addresses of the entries never change, so that native code can keep pointers to them.

    Args:
        prompt: tokens of the prompt.
        output: tokens output so far.
        max_seen: most distinct tokens that the request can see; only the entries in use occupy memory.
    """

    def __init__(self, prompt: list[int], output: list[int], max_seen: int) -> None:
        self.seen_ids: npt.NDArray[np.int32] = np.empty(max_seen, dtype=np.int32)
        self.output_counts: npt.NDArray[np.int32] = np.empty(max_seen, dtype=np.int32)
        seen = list(dict.fromkeys(prompt))
        self.seen_ids[: len(seen)] = seen
        self.output_counts[: len(seen)] = 0
        self._num_seen = ctypes.c_int64(len(seen))
        self._index_of = dict(zip(seen, range(len(seen)), strict=True))
        for token_id in output:
            self.add(token_id)

    @classmethod
    def count(cls, prompt: list[int], output: list[int], max_tokens: int, vocab_size: int) -> Self:
        """Count the tokens of a request that enters the batch and may output `max_tokens`."""
        return cls(prompt, output, min(vocab_size, len(set(prompt)) + max_tokens))

    def add(self, token_id: int) -> None:
        """Count a token that was just sampled.

        Raises:
            IndexError: there are more than `max_seen` distinct tokens.
        """
        index = self._index_of.get(token_id)
        if index is None:
            index = self._num_seen.value
            self.seen_ids[index], self.output_counts[index] = token_id, 0
            self._index_of[token_id] = index
            self._num_seen.value = index + 1
        self.output_counts[index] += 1

    @property
    def num_seen(self) -> int:
        """Distinct tokens seen so far."""
        return self._num_seen.value

    @property
    def num_seen_address(self) -> int:
        """The address of that number, for native code."""
        return ctypes.addressof(self._num_seen)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return seen_ids_S and output_counts_S as views."""
        num_seen = self.num_seen
        return torch.from_numpy(self.seen_ids[:num_seen]), torch.from_numpy(self.output_counts[:num_seen])
