"""`WeightsLLM`: the methods of `LLM` that pause its engine, change its weights, and free their memory."""

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from octavo.frontend.live_weights import Weights
from octavo.protocol.weights import InFlightMode, PauseMode, WeightsStatus

if TYPE_CHECKING:
    from octavo.frontend.client import AsyncClient

T = TypeVar("T")


class WeightsLLM(ABC):
    """Mixin of `LLM`."""

    client: "AsyncClient"

    def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stop drawing tokens until `resume_generation`; see `AsyncClient.pause_generation`."""
        self._run(self.client.pause_generation(mode=mode, clear_cache=clear_cache))

    def resume_generation(self) -> None:
        """End a pause."""
        self._run(self.client.resume_generation())

    def is_paused(self) -> bool:
        """Return whether the engine is paused or asleep."""
        return self._run(self.client.is_paused())

    def update_weights(
        self,
        weights: Weights,
        *,
        label: str = "",
        is_partial: bool = False,
        in_flight: InFlightMode = "recompute",
        is_kept: bool = True,
    ) -> int:
        """Replace the weights while the engine serves, and return their version; see `AsyncClient.update_weights`."""
        update = self.client.update_weights(
            weights, label=label, is_partial=is_partial, in_flight=in_flight, is_kept=is_kept
        )
        return self._run(update)

    def sleep(self, level: int = 1, *, mode: PauseMode = "abort") -> None:
        """Free the memory of the KV cache and the weights; see `AsyncClient.sleep`."""
        self._run(self.client.sleep(level, mode=mode))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory again; see `AsyncClient.wake_up`."""
        self._run(self.client.wake_up(tags))

    def is_sleeping(self) -> bool:
        """Return whether the engine still lacks its weights or its KV cache after `sleep`."""
        return self._run(self.client.is_sleeping())

    def weights_status(self) -> dict[int, WeightsStatus]:
        """Return, by engine index, the version of the engine's weights and whether it is paused or asleep."""
        return self._run(self.client.weights_status())

    @abstractmethod
    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's thread, and wait for its result."""
