"""`BlockLoads`: contents that arrive in blocks of the device from elsewhere, while steps go on.

Knows no bytes and decides nothing. Where contents come from is a detail of each load, which the workers carry out.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from octavo.core_proc.cache.files import FileTier
from octavo.core_proc.cache.host_tier import HostTier
from octavo.core_proc.cache.pool import BlockPool
from octavo.core_proc.request import Request, RequestState
from octavo.protocol.ids import BlockId
from octavo.protocol.steps import BlockCopy


@dataclass(slots=True, eq=False)
class BlockLoad:
    """Blocks that the workers fill for one request.

    It has a reference to each of them, so nobody else gets them before the workers have answered, whatever becomes of
    the request.
    """

    number: int
    request: Request
    """In state `SWAPPED` until the load ends, unless it is aborted."""
    places: list[tuple[int, int]]
    """Index and group of each block."""
    keys: list[bytes]
    block_ids: list[BlockId]
    held: list[BlockId]
    """Cached blocks that the request can use with them, which must not be evicted meanwhile."""
    from_host: list[BlockCopy] = field(default_factory=list)
    """Blocks that host memory has, as (host block, block)."""
    copies_out: list[BlockCopy] = field(default_factory=list)
    """Copies that no plan makes before it, and which must be made before: see `StepPlan`."""
    copies_in: list[BlockCopy] = field(default_factory=list)
    from_files: list[tuple[bytes, BlockId]] = field(default_factory=list)
    """Blocks that files have, by key."""
    state_key: bytes = b""
    """Of the recurrent state after these blocks, if the device does not have it; host memory keeps it until the request
    starts."""
    state_place: BlockId | None = None
    """In host memory; None: there is no room, or none is needed."""
    states_from_files: list[tuple[bytes, BlockId]] = field(default_factory=list)
    """The state, if it must be read into its place."""
    is_stale: bool = False
    """The weights have changed: nobody may find what arrives."""


class BlockLoads:
    """The loads in flight, and blocks that have arrived and wait until their request starts.

    A content can be found only when all workers have it. Blocks that have arrived may be given up at any time; they
    stay in the cache as long as nobody else takes them.
    """

    def __init__(
        self, pool: BlockPool, host: HostTier | None, files: FileTier | None, host_states: HostTier | None = None
    ) -> None:
        self._pool = pool
        self._host = host
        self._files = files
        self._host_states = host_states
        self.in_flight: dict[int, BlockLoad] = {}
        self._landed: dict[Request, list[BlockId]] = {}
        self._landed_states: dict[Request, BlockId] = {}
        """Their states, in host memory."""
        self._num_arrived: dict[Request, int] = {}
        self._begun: list[BlockLoad] = []
        self._num_begun = 0

    @property
    def swapped(self) -> list[Request]:
        """The requests that wait for loads."""
        return [load.request for load in self.in_flight.values() if load.request.state is RequestState.SWAPPED]

    @property
    def newest(self) -> BlockLoad | None:
        """The first load that was begun since `take_begun`."""
        return self._begun[0] if self._begun else None

    def references(self) -> list[tuple[Request, list[BlockId]]]:
        """Return the blocks to which loads in flight and arrived ones refer, with their requests."""
        loading = [(load.request, [*load.held, *load.block_ids]) for load in self.in_flight.values()]
        return [*loading, *self._landed.items()]

    def pins(self, tier: HostTier) -> list[BlockId]:
        """Return the places of a tier that loads in flight, and states that have arrived, keep there."""
        loads = self.in_flight.values()
        if tier is self._host:
            return [host_id for load in loads for host_id, _ in load.from_host]
        if tier is not self._host_states:
            return []
        loading = [load.state_place for load in loads if load.state_place is not None]
        return [*loading, *self._landed_states.values()]

    def begin(
        self,
        request: Request,
        places: list[tuple[int, int]],
        keys: list[bytes],
        held: list[BlockId],
        state_key: bytes = b"",
    ) -> BlockLoad:
        """Allocate blocks for contents that are elsewhere, and begin to fill them.

        Args:
            request: waits for them.
            places: index and group of each block.
            keys: of the contents, which host memory or files have.
            held: cached blocks that the request can use with them.
            state_key: of the recurrent state after them, if it is elsewhere; b"": it is not, or there is none.

        Raises:
            OutOfBlocks: not enough are free.
        """
        for block_id in held:
            self._pool.incref(block_id)
        # Before blocks are allocated: these may lose contents, which must not take the places of what is loaded.
        host = {} if self._host is None else self._host.pin_for_load(keys)
        block_ids = [self._pool.allocate() for _ in keys]
        load = BlockLoad(self._num_begun, request, places, keys, block_ids, held)
        for key, block_id in zip(keys, block_ids, strict=True):
            if key in host:
                load.from_host.append((host[key], block_id))
            else:
                load.from_files.append((key, block_id))
        if state_key and self._host_states is not None:
            self._begin_state(self._host_states, load, state_key)
        self._num_begun += 1
        self.in_flight[load.number] = load
        self._begun.append(load)
        return load

    def _begin_state(self, host: HostTier, load: BlockLoad, key: bytes) -> None:
        load.state_key, load.state_place = key, host.hold(key)
        if load.state_place is None and (place := host.reserve()) is not None:
            load.state_place = place
            load.states_from_files.append((key, place))

    def take_begun(self) -> list[BlockLoad]:
        """Return the loads that were begun since the last call: the workers begin them after the latest plan."""
        begun, self._begun = self._begun, []
        return begun

    def finish(
        self, number: int, missing: Collection[BlockId], missing_states: Collection[BlockId] = ()
    ) -> tuple[BlockLoad, list[int]] | None:
        """End a load. Its request, if it still waits, gets its blocks when it starts.

        Args:
            number: of the load.
            missing: blocks whose contents have not arrived.
            missing_states: places in host memory to which states have not come.

        Returns:
            The load, and which of its blocks can be found from now on; None if the workers were lost meanwhile.
        """
        if (load := self.in_flight.pop(number, None)) is None:
            return None
        if self._host is not None:
            self._host.unpin([host_id for host_id, _ in load.from_host])
        if self._files is not None and (missing or missing_states):
            lost = [key for key, block_id in load.from_files if block_id in missing]
            lost += [key for key, place in load.states_from_files if place in missing_states]
            self._files.change((), lost)
        arrived = []
        if not load.is_stale:
            arrived = [
                place
                for place, (block_id, key) in enumerate(zip(load.block_ids, load.keys, strict=True))
                if block_id not in missing and self._pool.set_hash(block_id, key)
            ]
        is_whole = not (load.is_stale or missing or missing_states)
        state_place = self._finish_state(load, is_whole=is_whole)
        if load.request.state is RequestState.SWAPPED and is_whole:
            num_arrived = self.num_arrived(load.request) + len({load.places[place][0] for place in arrived})
            landed = [*load.held, *map(self._hold, load.keys)]
            self.release(load.request)  # of an earlier load: more was found for the request before it started
            self._landed[load.request], self._num_arrived[load.request] = landed, num_arrived
            if state_place is not None:
                self._landed_states[load.request] = state_place
        else:  # nobody can continue from blocks behind one that is missing, so they must not be held
            self._pool.release(load.held)
            self._unpin_state(state_place)
        self._pool.release(load.block_ids)
        return load, arrived

    def _finish_state(self, load: BlockLoad, *, is_whole: bool) -> BlockId | None:
        """Let the state of a load be found if it has come; returns the place that is pinned for its request."""
        if load.state_place is None or self._host_states is None:
            return None
        if not is_whole:
            return load.state_place
        for key, place in load.states_from_files:
            self._host_states.land(key, place)
        held = self._host_states.hold(load.state_key)  # elsewhere if the device has lost the same state meanwhile
        self._unpin_state(load.state_place)
        return held

    def _unpin_state(self, place: BlockId | None) -> None:
        if place is not None and self._host_states is not None:
            self._host_states.unpin([place])

    def _hold(self, key: bytes) -> BlockId:
        """Keep the block with a content, which may be another one than was filled."""
        block_id = self._pool.find(key)
        assert block_id is not None, "a content that has arrived cannot be found"
        self._pool.incref(block_id)
        return block_id

    def release(self, request: Request) -> None:
        """Give up the blocks that have arrived for a request, which has its own references to them or needs none."""
        self._pool.release(self._landed.pop(request, ()))
        self._num_arrived.pop(request, None)
        self._unpin_state(self._landed_states.pop(request, None))

    def num_arrived(self, request: Request) -> int:
        """Return how many blocks of each group have arrived for a request and are kept for it."""
        return self._num_arrived.get(request, 0)

    def release_landed(self, *, besides: Request | None = None) -> bool:
        """Give up the blocks that have arrived for any other request; returns whether there were any."""
        requests = [request for request in self._landed if request is not besides]
        for request in requests:
            self.release(request)
        return bool(requests)

    def invalidate(self) -> None:
        """Let nobody find what arrives later: the weights have changed."""
        self.release_landed()
        for load in self.in_flight.values():
            load.is_stale = True

    def lose(self) -> list[Request]:
        """Drop all loads: the workers are lost. Returns the requests that were waiting for them."""
        requests = self.swapped
        self._begun.clear()
        self.invalidate()
        for number in list(self.in_flight):
            self.finish(number, ())
        return requests
