"""`BlockLoads`: device blocks that are filled from another tier while steps continue.

Knows no bytes and decides nothing. Each load says where its contents come from; the workers execute it.
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

    The load holds a reference to each block. So nobody else gets them before the workers have responded, even if the
    request ends.
    """

    number: int
    request: Request
    """In state `SWAPPED` until the load ends, unless it is aborted."""
    places: list[tuple[int, int]]
    """Index and group of each block."""
    keys: list[bytes]
    block_ids: list[BlockId]
    held: list[BlockId]
    """Cached blocks that the request will use with them, and that must not be evicted meanwhile."""
    from_host: list[BlockCopy] = field(default_factory=list)
    """Blocks to copy from host memory, as (host block, device block)."""
    copies_out: list[BlockCopy] = field(default_factory=list)
    """Copies that must be made before the load, if no plan makes them: see `StepPlan`."""
    copies_in: list[BlockCopy] = field(default_factory=list)
    from_files: list[tuple[bytes, BlockId]] = field(default_factory=list)
    """Blocks to load from files, as (key, device block)."""
    state_key: bytes = b""
    """Key of the recurrent state after these blocks, if the state is not on the device. Host memory keeps the state
    until the request starts. Empty if no state is loaded."""
    state_place: BlockId | None = None
    """Host slot of the state. None if there is no room or no state is loaded."""
    states_from_files: list[tuple[bytes, BlockId]] = field(default_factory=list)
    """The state as (key, host slot), if it must be read from a file."""
    is_stale: bool = False
    """True after the weights have changed: the contents must not enter the cache."""


class BlockLoads:
    """The loads in flight, and loaded blocks that wait until their request starts.

    Contents can be found only when all workers have them. Loaded blocks may be released at any time; they stay in the
    cache until they are evicted.
    """

    def __init__(
        self, pool: BlockPool, host: HostTier | None, files: FileTier | None, host_states: HostTier | None = None
    ) -> None:
        self._pool = pool
        self._host = host
        self._files = files
        self._host_states = host_states
        self.in_flight: dict[int, BlockLoad] = {}
        self._loaded: dict[Request, list[BlockId]] = {}
        self._loaded_states: dict[Request, BlockId] = {}
        """Host slots of loaded states, by request."""
        self._num_arrived: dict[Request, int] = {}
        self._begun: list[BlockLoad] = []
        self._num_begun = 0

    @property
    def swapped(self) -> list[Request]:
        """The requests that wait for loads."""
        return [load.request for load in self.in_flight.values() if load.request.state is RequestState.SWAPPED]

    @property
    def newest(self) -> BlockLoad | None:
        """The first load that was begun since `take_begun`. None if there is none."""
        return self._begun[0] if self._begun else None

    def references(self) -> list[tuple[Request, list[BlockId]]]:
        """Return the blocks referenced by loads in flight and by finished loads, with their requests."""
        loading = [(load.request, [*load.held, *load.block_ids]) for load in self.in_flight.values()]
        return [*loading, *self._loaded.items()]

    def pins(self, tier: HostTier) -> list[BlockId]:
        """Return the host blocks of a tier that are pinned by loads in flight and by loaded states."""
        loads = self.in_flight.values()
        if tier is self._host:
            return [host_id for load in loads for host_id, _ in load.from_host]
        if tier is not self._host_states:
            return []
        loading = [load.state_place for load in loads if load.state_place is not None]
        return [*loading, *self._loaded_states.values()]

    def begin(
        self,
        request: Request,
        places: list[tuple[int, int]],
        keys: list[bytes],
        held: list[BlockId],
        state_key: bytes = b"",
    ) -> BlockLoad:
        """Allocate blocks for contents in another tier, and begin to fill them.

        Args:
            request: the request that waits for them.
            places: index and group of each block.
            keys: their keys, which are in host memory or in files.
            held: cached blocks that the request will use with them.
            state_key: key of the recurrent state after them. Empty if it is on the device or does not exist.

        Raises:
            OutOfBlocks: there are not enough free blocks.
        """
        for block_id in held:
            self._pool.incref(block_id)
        # Pin before allocating: blocks evicted by the allocation must not replace the ones to be loaded.
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
        """Return the loads begun since the last call. The workers begin them after the latest plan."""
        begun, self._begun = self._begun, []
        return begun

    def finish(
        self, number: int, missing: Collection[BlockId], missing_states: Collection[BlockId] = ()
    ) -> tuple[BlockLoad, list[int]] | None:
        """End a load. If its request still waits, it receives the blocks when it starts.

        Args:
            number: number of the load.
            missing: blocks that were not filled.
            missing_states: host slots of states that were not read.

        Returns:
            The load, and the indices of its blocks that can be found from now on. None if the workers were lost
            meanwhile.
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
            loaded = [*load.held, *map(self._hold, load.keys)]
            self.release(load.request)  # an earlier load: more was found for the request before it started
            self._loaded[load.request], self._num_arrived[load.request] = loaded, num_arrived
            if state_place is not None:
                self._loaded_states[load.request] = state_place
        else:  # a request cannot continue past a missing block, so the blocks must not stay pinned
            self._pool.release(load.held)
            self._unpin_state(state_place)
        self._pool.release(load.block_ids)
        return load, arrived

    def _finish_state(self, load: BlockLoad, *, is_whole: bool) -> BlockId | None:
        """Make the state of a load available if it has arrived. Return the host slot that is pinned for its request."""
        if load.state_place is None or self._host_states is None:
            return None
        if not is_whole:
            return load.state_place
        for key, place in load.states_from_files:
            self._host_states.insert_loaded(key, place)
        held = self._host_states.hold(load.state_key)  # in another slot if the device has evicted this state again
        self._unpin_state(load.state_place)
        return held

    def _unpin_state(self, place: BlockId | None) -> None:
        if place is not None and self._host_states is not None:
            self._host_states.unpin([place])

    def _hold(self, key: bytes) -> BlockId:
        """Add a reference to the block with this key, which may differ from the block that was filled."""
        block_id = self._pool.find(key)
        assert block_id is not None, "a content that has arrived cannot be found"
        self._pool.incref(block_id)
        return block_id

    def release(self, request: Request) -> None:
        """Release the blocks loaded for a request. It has its own references to them, or does not need them."""
        self._pool.release(self._loaded.pop(request, ()))
        self._num_arrived.pop(request, None)
        self._unpin_state(self._loaded_states.pop(request, None))

    def num_arrived(self, request: Request) -> int:
        """Return how many blocks per group were loaded for a request and are held for it."""
        return self._num_arrived.get(request, 0)

    def release_loaded(self, *, except_for: Request | None = None) -> bool:
        """Release the blocks loaded for any other request. Return whether there were any."""
        requests = [request for request in self._loaded if request is not except_for]
        for request in requests:
            self.release(request)
        return bool(requests)

    def invalidate(self) -> None:
        """Keep all loads in flight out of the cache: the weights have changed."""
        self.release_loaded()
        for load in self.in_flight.values():
            load.is_stale = True

    def lose(self) -> list[Request]:
        """Drop all loads: the workers are lost. Return the requests that waited for them."""
        requests = self.swapped
        self._begun.clear()
        self.invalidate()
        for number in list(self.in_flight):
            self.finish(number, ())
        return requests
