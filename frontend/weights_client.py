"""`WeightsClient`: the methods of `AsyncClient` that pause engines, change their weights, and free their memory."""

from collections.abc import Sequence

from octavo.frontend.live_weights import LiveWeights, Weights
from octavo.protocol.weights import InFlightMode, PauseMode, TransferGroup, WakeTag, WeightsStatus


class WeightsClient:
    """Mixin of `AsyncClient`."""

    _weights: LiveWeights

    async def pause_generation(
        self, *, mode: PauseMode = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """Draw no more tokens until `resume_generation`; new requests wait. Requests of all clients are affected.

        Blocks until: no step is in flight, and the requests that `mode` ends have ended.

        Args:
            mode: what happens to live requests: "abort" ends them, "wait" lets them finish, "keep" stops them where
                they are, and they continue later.
            wait_for_inflight_requests: the same as mode="wait"; vLLM's older name.
            clear_cache: forget cached prefixes; requests that are kept are computed again.

        Raises:
            RequestFailedError: an engine could not; the message says which.
        """
        await self._weights.pause("wait" if wait_for_inflight_requests else mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """End a pause."""
        await self._weights.resume()

    async def is_paused(self) -> bool:
        """Return whether an engine is paused, or asleep."""
        return any(status.is_paused for status in (await self._weights.status()).values())

    def get_world_size(self) -> int:
        """Return the number of workers of all engines."""
        return self._weights.world_size

    async def init_weight_transfer_engine(self, group: TransferGroup) -> None:
        """Make all workers join a group of torch.distributed, whose rank 0 is a trainer; `WeightSender.open` does it.

        Blocks until: all ranks have joined.

        Args:
            group: its `rank_offset` is the rank of the first worker of the first engine; the others follow.

        Raises:
            RequestFailedError: an engine could not join; the message says why.
            InvalidRequestError: the group has not enough ranks.
        """
        await self._weights.join(group)

    async def update_weights(
        self,
        weights: Weights,
        *,
        label: str = "",
        is_partial: bool = False,
        in_flight: InFlightMode = "recompute",
        is_kept: bool = True,
    ) -> int:
        """Exchange the weights of all engines, which go on serving; see docs/weight-updates.md.

        Blocks until: all engines compute with the new weights.

        Args:
            weights: a checkpoint on the engines' machine (a folder or a file), or named tensors of this process: a
                dict, or an iterator of pairs, which go through shared memory; or a `Transfer`, what rank 0 broadcasts.
            label: what to call them.
            is_partial: tensors may be missing, and stay as they are.
            in_flight: "recompute": requests that have begun compute keys and values again, with the new weights;
                "continue": they keep those of the old ones. Their outputs stay in both cases, and say which weights
                drew which tokens.
            is_kept: keep sent tensors in shared memory, so that a worker or core that dies comes back with them. False:
                the engine then refuses requests until all weights are updated again.

        Returns:
            The version of the new weights.

        Raises:
            RequestFailedError: an engine has refused them, and still has the old ones; or it failed in the middle, and
                rejects requests until all weights are updated. The message says which engines did not change.
            InvalidRequestError: an argument is invalid, or shared memory does not suffice.
        """
        return await self._weights.update(
            weights, label=label, is_partial=is_partial, in_flight=in_flight, is_kept=is_kept
        )

    async def sleep(self, level: int = 1, *, mode: PauseMode = "abort") -> None:
        """Pause, and free the memory of the KV cache and of weights. Requests wait until `wake_up`.

        Args:
            level: 1: weights move to host memory (on CPUs they stay there), 2: they are dropped, and must be updated
                after `wake_up`.
            mode: what happens to live requests; see `pause_generation`.
        """
        await self._weights.sleep(level, mode)

    async def wake_up(self, tags: Sequence[WakeTag] | None = None) -> None:
        """Take memory again.

        Args:
            tags: "weights", "kv_cache"; None: both. Requests continue once both are back.
        """
        await self._weights.wake_up(tags)

    async def is_sleeping(self) -> bool:
        """Return whether an engine lacks anything that `wake_up` brings back."""
        return any(status.asleep for status in (await self._weights.status()).values())

    async def weights_status(self) -> dict[int, WeightsStatus]:
        """Return the version of the weights of each engine, by index, and whether it is paused or asleep."""
        return await self._weights.status()
