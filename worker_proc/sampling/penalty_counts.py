"""How often a request has seen each token, for its penalties. Applies none."""

import ctypes
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class PenaltyCounts:
    """The tokens of a request's prompt and output, each once, with the number of times it was output.

    Kept only for requests with penalties. There is one entry for each token that was seen and not one for each
    of the vocabulary, and their places in memory never change, so that native code can hold on to them.

    Args:
        prompt: tokens of the prompt.
        output: tokens output so far.
        max_seen: how many different tokens the request can come to see; memory is taken for those it has seen.
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
            IndexError: the request has seen more tokens than it said it could.
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
        """Different tokens seen so far."""
        return self._num_seen.value

    @property
    def num_seen_address(self) -> int:
        """Where native code reads that number."""
        return ctypes.addressof(self._num_seen)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return seen_ids_S and output_counts_S as views."""
        num_seen = self.num_seen
        return torch.from_numpy(self.seen_ids[:num_seen]), torch.from_numpy(self.output_counts[:num_seen])
