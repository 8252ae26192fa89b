"""Logits processors: user code that changes logits in the workers, between the model and the filters.

The interface is that of vLLM v1: names, signatures and the order of calls are the same. Tensors are torch's, which this
package does not import. Workers load and run processors: see `octavo.worker_proc.sampling.processors`.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.params import SamplingParams

Tensor: TypeAlias = Any


class MoveDirectionality(Enum):
    """How a request moves within the batch."""

    UNIDIRECTIONAL = 0
    """From one index to another one, which is free or may be overwritten."""
    SWAP = 1
    """Two requests swap places. octavo never swaps."""


AddedRequest: TypeAlias = tuple[int, SamplingParams, list[int] | None, list[int]]
"""Index, parameters, prompt tokens, and the list of output tokens, which grows as tokens are sampled."""
MovedRequest: TypeAlias = tuple[int, int, MoveDirectionality]


@dataclass(frozen=True)
class BatchUpdate:
    """The changes of the batch since the last step, to be applied in the order removed, added, moved."""

    batch_size: int
    """Number of requests in the batch, and of rows in the next `apply`."""
    removed: Sequence[int]
    """Indices of removed requests that no other request has taken over."""
    added: Sequence[AddedRequest]
    """New requests, at free indices or replacing others."""
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Changes the logits of a batch. One object lives as long as its worker.

    The tokens of a request depend only on that request as long as `apply` computes each row independently.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Check the `extra_args` of a request.

        Raises:
            ValueError: the arguments are invalid. The message is returned to the caller.
        """
        return

    @abstractmethod
    def __init__(self, config: ResolvedConfig, device: Any, is_pin_memory: bool) -> None:
        """Initialize the processor in a worker.

        Args:
            config: the engine's configuration.
            device: the `torch.device` of the logits.
            is_pin_memory: whether copies to the device are faster from pinned memory.
        """

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Return True if the most likely token never changes. Greedy requests then skip this processor."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply the changes of the batch. Called before each `apply`; None if only output tokens were added."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Return the changed logits, in place or not: float32, one row per request of the batch.

        The row of a request that samples no token in this step is zeros, and its result is ignored.
        """


RowProcessor: TypeAlias = Callable[..., Tensor]
"""Changes one row: `(output_token_ids, logits)` or `(prompt_token_ids, output_token_ids, logits)`."""


class AdapterLogitsProcessor(LogitsProcessor):
    """A batch processor that applies a function per request."""

    def __init__(self, config: ResolvedConfig, device: Any, is_pin_memory: bool) -> None:
        self._rows: dict[int, Callable[[Tensor], Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RowProcessor | None:
        """Return the function that changes the logits of a new request. Return None if they stay unchanged."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """See `LogitsProcessor`."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self._rows.pop(index, None)
            if (processor := self.new_req_logits_processor(params)) is not None:
                self._rows[index] = _bind(processor, prompt, output)
        for source, target, direction in batch_update.moved:
            moving, staying = self._rows.pop(source, None), self._rows.pop(target, None)
            if moving is not None:
                self._rows[target] = moving
            if direction is MoveDirectionality.SWAP and staying is not None:
                self._rows[source] = staying

    def apply(self, logits: Tensor) -> Tensor:
        """See `LogitsProcessor`."""
        for index, process in self._rows.items():
            logits[index] = process(logits[index])
        return logits


def _bind(processor: RowProcessor, prompt: list[int] | None, output: list[int]) -> Callable[[Tensor], Tensor]:
    takes_prompt = len(inspect.signature(processor).parameters) == 3
    return (lambda row: processor(prompt, output, row)) if takes_prompt else (lambda row: processor(output, row))
