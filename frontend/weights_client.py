"""`WeightsClient`: the methods of `AsyncClient` that pause engines, change their weights, and free their memory."""

from collections.abc import Sequence

from octavo.frontend.live_weights import LiveWeights, Weights
from octavo.protocol.weights import InFlightMode, PauseMode, TransferGroup, WeightsStatus


class WeightsClient:
    """Mixin of `AsyncClient`."""

    _weights: LiveWeights

    async def pause_generation(
        self, *, mode: PauseMode = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """Stop drawing tokens until `resume_generation`. Live requests of all clients are affected; new requests wait.

        Blocks until: no step is in flight, and the requests that `mode` ends have ended.

        Args:
            mode: what happens to live requests. "abort": they are aborted. "wait": they run to their end. "keep": they
                stop where they are, and continue after `resume_generation`.
            wait_for_inflight_requests: vLLM's older name for mode="wait".
            clear_cache: drop cached prefixes; kept requests are then computed again.

        Raises:
            RequestFailedError: an engine could not pause; the message says which.
        """
        await self._weights.pause("wait" if wait_for_inflight_requests else mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """End a pause."""
        await self._weights.resume()

    async def is_paused(self) -> bool:
        """Return whether any engine is paused or asleep."""
        return any(status.is_paused for status in (await self._weights.status()).values())

    def get_world_size(self) -> int:
        """Return the number of workers of all engines together."""
        return self._weights.world_size

    async def init_weight_transfer_engine(self, group: TransferGroup) -> None:
        """Make all workers join a torch.distributed group whose rank 0 is a trainer; `WeightSender.open` calls this.

        Blocks until: all ranks have joined.

        Args:
            group: its `rank_offset` is the rank of the first worker of the first engine; the other workers follow.

        Raises:
            RequestFailedError: an engine could not join; the message says why.
            InvalidRequestError: the group has too few ranks.
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
        """Replace the weights of all engines while they serve; see docs/weight-updates.md.

        Blocks until: all engines compute with the new weights.

        Args:
            weights: a checkpoint on the engines' machine (a folder or a file); or named tensors of this process, as a
                dict or an iterator of pairs, which are sent through shared memory; or a `Transfer`, which rank 0
                broadcasts.
            label: a name for these weights, shown in their status.
            is_partial: allow tensors to be missing; missing tensors keep their values.
            in_flight: "recompute": running requests compute their keys and values again, with the new weights.
                "continue": they keep the keys and values of the old weights. Tokens that were already drawn remain in
                both cases; outputs report which weights drew which tokens.
            is_kept: keep sent tensors in shared memory, so that a restarted worker or core loads them again. If
                `False`, an engine whose worker or core has died rejects requests until all weights are updated again.

        Returns:
            The version of the new weights.

        Raises:
            InvalidRequestError: an argument is invalid, shared memory is too small, or the weights do not fit the
                model. All engines still have the old weights.
            ConflictError: an engine is asleep, or lacks weights that a partial update does not contain.
            RequestFailedError: the update failed midway, and the engine rejects requests until all weights are updated.
                The message says which engines did not change.
        """
        return await self._weights.update(
            weights, label=label, is_partial=is_partial, in_flight=in_flight, is_kept=is_kept
        )

    async def sleep(self, level: int = 1, *, mode: PauseMode = "abort") -> None:
        """Pause, and free the memory of the KV cache and the weights. Requests wait until `wake_up`.

        Args:
            level: 1: weights move to host memory (on CPUs they remain in place). 2: weights are dropped, and must be
                updated after `wake_up`. 0: only pause, without clearing the cache.
            mode: what happens to live requests; see `pause_generation`.
        """
        await self._weights.sleep(level, mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory again that `sleep` has freed.

        Args:
            tags: what to allocate: "weights", "kv_cache". `None`: both. Requests continue once both are allocated.
                "scheduling" allocates nothing, and ends a sleep of level 0.

        Raises:
            ConflictError: the tags are only "scheduling", and memory is still freed.
        """
        await self._weights.wake_up(tags)

    async def is_sleeping(self) -> bool:
        """Return whether any engine still lacks its weights or its KV cache after `sleep`."""
        return any(status.asleep for status in (await self._weights.status()).values())

    async def weights_status(self) -> dict[int, WeightsStatus]:
        """Return, by engine index, the version of the engine's weights and whether it is paused or asleep."""
        return await self._weights.status()
