"""A worker without a model: executes plans as a real one does, and checks every rule that a plan must keep.

Its cache holds the model's states in blocks, written and read where the block tables say. Knows nothing of processes:
`tests/support/core_fake_worker.py` is one around it, `group.py` the simulated kind.
"""

# long: its checks share rows and cache

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from msgspec.structs import replace

from octavo.protocol.adapters import NO_ADAPTER, AdapterFault
from octavo.protocol.config import CacheGroupSpec, DeviceFacts, ResolvedConfig
from octavo.protocol.events import PooledOutput, TokenLogprobs
from octavo.protocol.ids import ID_BYTES, IdArray, pack_ids, unpack_ids
from octavo.protocol.params import PoolingSpec, SamplingSpec
from octavo.protocol.steps import POOLED, UNREAD_DRAFT, Admitted, Scheduled, StepPlan, StepResult, TokenMask
from octavo.protocol.worker_commands import BlocksLoaded, LoadBlocks, StoreBlocks
from simulation.media import SimulatedEncoder, seen
from simulation.model import DAMAGED_MARK, draft, draw, extend_states, logprob, root_state, vector
from simulation.multi_step import execute_steps, is_last, is_plain

NULL_BLOCK = -1
ONE_GROUP = (CacheGroupSpec(num_layers=1, block_bytes=1000),)
NUM_LANDING = 3
"""Recurrent states for which host memory has room if it is for no blocks."""
LOAD_S = 0.001
"""In which a block is loaded from a file."""


class PlanRejected(AssertionError):
    """A plan that no worker can execute, or that would compute a wrong result."""


def require(condition: bool, message: str) -> None:
    """Reject the plan unless the condition holds; not an `assert`, which Python can disable."""
    if not condition:
        raise PlanRejected(message)


@dataclass(slots=True)
class Row:
    """One slot of the batch."""

    admitted: Admitted
    token_ids: list[int]
    block_ids: list[list[int]]
    """Of each cache group."""
    root: int
    states: list[int] = field(default_factory=list)
    """The states that the cache must hold for it, by position."""
    num_computed: int = 0
    """The position at which its latest step ended."""
    num_returned: int = 0
    """Tokens that the first stage of a pipeline knows."""
    num_draft_tokens: int = 0
    made_drafts: IdArray = field(default_factory=pack_ids)
    """The latest that were made for it."""
    start: int = 0
    """First position of the part that was computed last."""
    """Last tokens of the row that this step verifies."""
    num_collected: int = 0
    """Positions that are part of its vector."""


class SimulatedWorker:
    """One rank, after its cache is allocated."""

    def __init__(
        self,
        config: ResolvedConfig,
        num_blocks: int,
        groups: Sequence[CacheGroupSpec] = ONE_GROUP,
        num_host_blocks: int = 0,
        files: dict[bytes, list[int | None] | None] | None = None,
    ) -> None:
        self._files = {} if files is None else files
        self.rows: dict[int, Row] = {}
        self.next_sequence = 0
        self.num_computed_tokens = 0
        self.max_steps = 64
        """Steps after which a command interrupts a plan."""
        self.num_adapter_loads = 0
        self.adapters = [""] * (config.lora.max_loras if config.lora else 0)
        """The digest in each adapter slot."""
        self._block_size = config.block_size
        self._computes_whole_prompts = config.computes_whole_prompts
        self._max_num_seqs = config.max_num_seqs
        self._max_num_batched_tokens = config.max_num_batched_tokens
        self._vocab_size = config.model.vocab_size
        self._embedding_bytes = config.embedding_bytes
        self._num_blocks = num_blocks
        self._is_pipelined = config.pipeline_parallel_size > 1
        self._groups = groups
        self._states: dict[int, int] | None = {} if any(group.kind == "state" for group in groups) else None
        """The state in each slot of the group of states, which has as many slots as there are blocks."""
        speculation = config.speculation
        self._drafts_late = speculation is not None and speculation.max_depth % 2 == 1 and not self._is_pipelined
        """Whether the ids of drafts come with the next result, as from a device."""
        self._unread_drafts: list[tuple[int, IdArray]] = []
        self._may_have_passed = self._states is not None or any(group.window for group in groups)
        self._cache: list[int | None] = [None] * (num_blocks * config.block_size)
        """The state in each slot, block after block."""
        self._host: list[list[int | None] | None] = [None] * num_host_blocks
        """The states in each block of host memory; None: it was never written."""
        self._host_states: list[int | None] = [None] * max(num_host_blocks, NUM_LANDING)
        """That of each slot for recurrent states."""
        self.num_copied_in = self.num_states_copied_in = 0
        self._loading: dict[int, LoadBlocks] = {}
        self._encoder = SimulatedEncoder(config.media)

    def execute(self, plan: StepPlan, masks: Sequence[TokenMask] = ()) -> StepResult:
        """Apply a plan and return its result.

        Raises:
            PlanRejected: the plan, or what it would read from the cache, is wrong.
        """
        require(plan.sequence == self.next_sequence, f"step {plan.sequence} received, but {self.next_sequence} is next")
        self.next_sequence += 1
        if plan.num_steps == 1:
            return self._execute_step(plan, masks)
        require(is_plain(plan), "several steps of more than decodes")
        self._check_size(plan)
        return execute_steps(plan, self._execute_step, self._ends, self.max_steps)

    def _ends(self, slot: int, token_id: int, position: int) -> bool:
        admitted = self.rows[slot].admitted
        assert isinstance(admitted.params, SamplingSpec)
        return is_last(admitted.params, token_id, position + 1 - admitted.num_prompt_tokens)

    def _execute_step(self, plan: StepPlan, masks: Sequence[TokenMask] = ()) -> StepResult:
        faults = self._load_adapters(plan)
        self._change_rows(plan)
        self._copy_blocks(plan)
        self._copy_states(plan)
        self._check_size(plan)
        self._check_embeds(plan)
        ids = {slot: row.admitted.request_id for slot, row in self.rows.items()}
        for fault in self._encoder.faults(plan, ids):
            require(False, fault)
        self._add_draft_tokens(plan)
        # All of a step's states are written before any is read, as in every layer of a model.
        for part in plan.scheduled:
            self._write(part)
        for part in plan.scheduled:
            self._read(part)
        if self._states is not None:
            self._update_states(self._states, plan)
        result = self._sample(plan, {(slot, index): bytes(words) for slot, index, words in masks})
        return replace(result, adapter_faults=faults)

    def _load_adapters(self, plan: StepPlan) -> list[AdapterFault]:
        """Release rows and put adapters into slots; returns the loads that fail."""
        for slot in plan.released:
            require(slot in self.rows, f"slot {slot} is released and was not in use")
            del self.rows[slot]
        used = {row.admitted.adapter_slot for row in self.rows.values()}
        loaded = [load.slot for load in plan.adapter_loads]
        require(len(set(loaded)) == len(loaded), "two adapters enter a slot in one step")
        faults = []
        for load in plan.adapter_loads:
            require(0 <= load.slot < len(self.adapters), f"an adapter enters slot {load.slot}")
            require(load.slot not in used, f"an adapter enters slot {load.slot}, which is in use")
            digest = load.adapter.digest
            others = [held for slot, held in enumerate(self.adapters) if slot != load.slot]
            require(digest not in others, f"{load.adapter.name} is loaded twice")
            if digest.startswith(DAMAGED_MARK):
                faults.append(AdapterFault(load.slot, digest, f"{load.adapter.name} is damaged"))
                digest = ""
            self.adapters[load.slot] = digest
        self.num_adapter_loads += len(loaded)
        return faults

    def _change_rows(self, plan: StepPlan) -> None:
        for admitted in plan.admitted:
            slot, name = admitted.slot, admitted.request_id
            require(slot not in self.rows, f"{name} enters slot {slot}, which is in use")
            require(0 <= slot < self._max_num_seqs, f"{name} enters slot {slot}")
            require(0 < admitted.num_prompt_tokens <= len(admitted.token_ids), f"{name} has no prompt")
            self._check_blocks(name, admitted.block_ids)
            block_ids = [list(ids) for ids in admitted.block_ids]
            require(NO_ADAPTER <= admitted.adapter_slot < len(self.adapters), f"{name} has no such adapter slot")
            digest = "" if admitted.adapter_slot == NO_ADAPTER else self.adapters[admitted.adapter_slot]
            self.rows[slot] = Row(admitted, list(admitted.token_ids), block_ids, root_state(name, digest))
            self.rows[slot].num_returned = len(admitted.token_ids)
            prompt = seen(name, admitted.token_ids[: admitted.num_prompt_tokens])
            extend_states(self.rows[slot].states, prompt, self.rows[slot].root)
        for appended in plan.appended:
            row = self.rows[appended.slot]
            self._check_blocks(row.admitted.request_id, appended.block_ids)
            for own, more in zip(row.block_ids, appended.block_ids, strict=True):
                own += more
        require(self._is_pipelined or not plan.sampled, "tokens return though there is one stage")
        for slot, token_id in plan.sampled:
            row = self.rows[slot]
            require(row.token_ids[row.num_returned] == token_id, f"slot {slot} gets back a token that was not sampled")
            row.num_returned += 1

    def _check_blocks(self, name: str, block_ids: list[list[int]]) -> None:
        require(len(block_ids) == len(self._groups), f"{name} gets blocks of {len(block_ids)} groups")
        for block_id in chain.from_iterable(block_ids):
            is_there = 0 <= block_id < self._num_blocks or (block_id == NULL_BLOCK and self._may_have_passed)
            require(is_there, f"{name} gets block {block_id}, which does not exist")

    def begin_load(self, command: LoadBlocks) -> None:
        """Begin to fill blocks: until `finish_load` they hold what nobody may read."""
        self._copy_blocks(command)
        for _, place in command.states_from_files:
            self._host_states[place] = None
        self._loading[command.sequence] = command
        for _, block_id in (*command.from_host, *command.from_files):
            self._cache[block_id * self._block_size : (block_id + 1) * self._block_size] = [None] * self._block_size

    def finish_load(self, sequence: int) -> BlocksLoaded:
        """Fill the blocks of a load, with what host memory has by now."""
        command = self._loading.pop(sequence)
        for host_id, block_id in command.from_host:
            self._copy_in(host_id, block_id)
        for key, block_id in command.from_files:
            place = block_id * self._block_size
            self._cache[place : place + self._block_size] = self._files.get(key) or [None] * self._block_size
        missing = [block_id for key, block_id in command.from_files if self._files.get(key) is None]
        for key, place in command.states_from_files:
            (self._host_states[place],) = self._files.get(key) or [None]
        missing_states = [place for key, place in command.states_from_files if self._files.get(key) is None]
        for key, _ in (*command.from_files, *command.states_from_files):
            if key in self._files and self._files[key] is None:
                del self._files[key]
        return BlocksLoaded(sequence, 0, missing, LOAD_S * len(command.from_files), missing_states)

    def store(self, command: StoreBlocks) -> BlocksLoaded:
        """Write blocks or states to files."""
        for key, states in self.copies_for_files(command):
            self.write_file(key, states)
        return BlocksLoaded(command.sequence, 0)

    def copies_for_files(self, command: StoreBlocks) -> list[tuple[bytes, list[int | None]]]:
        """Return key and content of the blocks or states that are to be written to files, as they are now."""
        size, copies = self._block_size, []
        for block_id, key in command.blocks:
            states = self._cache[block_id * size : (block_id + 1) * size]
            if command.are_states:
                states = [(self._states or {}).get(block_id)]
            require(None not in states, f"block {block_id} is stored before it is full")
            require((self._files.get(key) or states) == states, f"block {block_id} is stored under a foreign key")
            copies.append((key, states))
        return copies

    def write_file(self, key: bytes, states: list[int | None] | None) -> None:
        """Write a content, unless it is there; None: what is written is damaged."""
        self._files.setdefault(key, states)

    def _copy_in(self, host_id: int, block_id: int) -> None:
        states = self._host[host_id]
        assert states is not None, f"host block {host_id} is read before it is written"
        self._cache[block_id * self._block_size : (block_id + 1) * self._block_size] = states
        self.num_copied_in += 1

    def _copy_blocks(self, plan: StepPlan | LoadBlocks) -> None:
        """Make the copies of a plan, each kind in any order."""
        size, written = self._block_size, [host_id for _, host_id in plan.copies_out]
        read = [host_id for host_id, _ in plan.copies_in]
        require(len(set(written)) == len(written), "two blocks are copied to one host block")
        targets = [block_id for _, block_id in plan.copies_in]
        require(len(set(targets)) == len(targets), "two blocks are copied to one block")
        require(all(0 <= host_id < len(self._host) for host_id in (*written, *read)), "a host block does not exist")
        for block_id, host_id in plan.copies_out:
            self._host[host_id] = self._cache[block_id * size : (block_id + 1) * size]
        for host_id, block_id in plan.copies_in:
            self._copy_in(host_id, block_id)

    def _copy_states(self, plan: StepPlan) -> None:
        """Make the copies of recurrent states of a plan."""
        states = {} if self._states is None else self._states
        targets = [slot for _, slot in plan.state_copies_in]
        written = [place for _, place in plan.state_copies_out]
        require(len(set(written)) == len(written), "two states are copied to one place in host memory")
        require(len(set(targets)) == len(targets), "two states are copied to one slot")
        for slot, place in plan.state_copies_out:
            self._host_states[place] = states[slot]
        for place, slot in plan.state_copies_in:
            state = self._host_states[place]
            assert state is not None, f"state {place} in host memory is read before it is written"
            states[slot] = state
        self.num_states_copied_in += len(targets)

    def _check_size(self, plan: StepPlan) -> None:
        num_tokens = sum([part.num_tokens for part in plan.scheduled])
        require(0 < num_tokens <= self._max_num_batched_tokens, f"a step of {num_tokens} tokens")
        require(len({part.slot for part in plan.scheduled}) == len(plan.scheduled), "a slot is scheduled twice")
        self.num_computed_tokens += num_tokens

    def _check_embeds(self, plan: StepPlan) -> None:
        """Verify that the step has the rows of all given positions that it computes, and no others."""
        found = [] if plan.prompt_embeds is None else plan.prompt_embeds.places
        wanted = [
            (part.slot, begin, end - begin)
            for part in plan.scheduled
            for first, num in self.rows[part.slot].admitted.embed_spans
            if (begin := max(part.start, first)) < (end := min(part.start + part.num_tokens, first + num))
        ]
        require(list(found) == wanted, f"the rows of a step are {found}, not {wanted}")
        if plan.prompt_embeds is not None and self._embedding_bytes == ID_BYTES:
            tokens = [self.rows[slot].token_ids[at : at + num] for slot, at, num in wanted]
            given = unpack_ids(bytes(plan.prompt_embeds.data.data)).tolist()
            require(given == [*chain.from_iterable(tokens)], "a step has rows of other positions")

    def _add_draft_tokens(self, plan: StepPlan) -> None:
        """Put drafts at the ends of their rows while the step is computed."""
        parts = {part.slot: part for part in plan.scheduled}
        require(len({slot for slot, _ in plan.draft_tokens}) == len(plan.draft_tokens), "two drafts for a slot")
        moved = {slot for slot, _, _ in plan.state_moves}
        require(len(moved) == len(plan.state_moves) and moved <= parts.keys(), "states of other requests move")
        is_kept = self._states is None or {slot for slot, _ in plan.draft_tokens} <= moved
        require(is_kept, "a state is overwritten by drafts that may be wrong")
        for slot, token_ids in plan.draft_tokens:
            row, part, num_positions = self.rows[slot], parts[slot], len(token_ids) + 1
            name = row.admitted.request_id
            require(num_positions > 1, f"{name} has no draft")
            require(part.num_tokens >= part.num_samples == num_positions, f"{name} has {num_positions - 1} drafts")
            if UNREAD_DRAFT in token_ids:
                require(len(token_ids) <= len(row.made_drafts), f"{name} has drafts that nobody has made")
                token_ids = row.made_drafts[: len(token_ids)]
            end = len(row.token_ids) + len(token_ids)
            require(part.start + part.num_tokens == end, f"{name} has drafts before its last token is known")
            is_again = self._states is not None
            require(part.num_tokens == num_positions or is_again, f"{name} has drafts after a prompt")
            row.token_ids += token_ids
            row.num_returned += len(token_ids)
            row.num_draft_tokens = len(token_ids)

    def _write(self, part: Scheduled) -> None:
        row, size = self.rows[part.slot], self._block_size
        name, start, end = row.admitted.request_id, part.start, part.start + part.num_tokens
        require(part.num_tokens > 0, f"{name}: nothing is scheduled")
        # It may be further on: what others have computed meanwhile is shared, and `_read` sees whether it is right.
        require(start >= row.num_computed, f"{name}: position {start} comes again, after {row.num_computed}")
        num_known = row.num_returned if self._is_pipelined else len(row.token_ids)
        require(end <= num_known, f"{name}: position {end} has no token yet")
        for block_ids in row.block_ids:
            require(end <= len(block_ids) * size, f"{name}: position {end} has no block")
        num_samples = (1 + row.num_draft_tokens) if end == len(row.token_ids) else 0
        require(part.num_samples == num_samples, f"{name}: samples {part.num_samples} at {end}")
        extend_states(row.states, row.token_ids, row.root)
        row.start, row.num_computed = start, end
        while start < end:
            index, offset = divmod(start, size)
            stop = min(end, (index + 1) * size)
            for block_ids in self._blocks_of(row):
                place = block_ids[index] * size + offset
                require(place >= 0, f"{name}: position {start} is written to the null block")
                self._cache[place : place + stop - start] = row.states[start:stop]
            start = stop

    def _read(self, part: Scheduled) -> None:
        """Read the states of the positions that each group's attention reads, up to the last one of the part."""
        for group, block_ids in zip(self._groups, self._blocks_of(self.rows[part.slot]), strict=False):
            first = 0
            if group.kind == "window":
                first = max(0, part.start - group.window + 1)
            elif group.kind == "chunk":
                first = part.start - part.start % group.window
            self._read_group(part, block_ids, first)

    def _blocks_of(self, row: Row) -> list[list[int]]:
        """Return the lists of the groups that have blocks."""
        return row.block_ids if self._states is None else row.block_ids[:-1]

    def _update_states(self, states: dict[int, int], plan: StepPlan) -> None:
        """Continue each request from the state before its part; sources are read before anything is written."""
        size, sources, written = self._block_size, {}, {}
        moves = {slot: move for slot, *move in plan.state_moves}
        for part in plan.scheduled:
            row, end = self.rows[part.slot], part.start + part.num_tokens
            name, slots = row.admitted.request_id, row.block_ids[-1]
            if part.start:
                source = slots[(part.start - 1) // size]
                if part.slot in moves:
                    source, destination = moves[part.slot]
                    require(source != destination, f"{name}: the state before its drafts is overwritten")
                    last = (end - 1) // size
                    slots[last:] = [destination] * (len(slots) - last)
                require(source != NULL_BLOCK, f"{name}: no state before position {part.start}")
                is_own = states.get(source) == row.states[part.start - 1]
                require(is_own, f"{name}: slot {source} holds something foreign before position {part.start}")
                sources[part.slot] = source
            destination = slots[(end - 1) // size]
            require(destination != NULL_BLOCK, f"{name}: no slot for the state after position {end - 1}")
            require(destination not in written, f"{name}: another request writes to slot {destination}")
            written[destination] = row.states[end - 1], part.slot
        for destination, (_, slot) in written.items():
            readers = {reader for reader, source in sources.items() if source == destination}
            require(readers <= {slot}, f"slot {destination} is written while others read it")
        states.update({destination: state for destination, (state, _) in written.items()})

    def _read_group(self, part: Scheduled, block_ids: list[int], first: int) -> None:
        row, size, end = self.rows[part.slot], self._block_size, part.start + part.num_tokens
        cache, states = self._cache, row.states
        for index in range(first // size, -(-end // size)):
            start, stop = max(first, index * size), min(end, (index + 1) * size)
            place = block_ids[index] * size - index * size
            if block_ids[index] == NULL_BLOCK or cache[place + start : place + stop] != states[start:stop]:
                raise PlanRejected(
                    f"{row.admitted.request_id}, step {self.next_sequence - 1}: block {block_ids[index]} "
                    f"holds something foreign for positions {start} to {stop - 1}"
                )

    def _sample(self, plan: StepPlan, masks: dict[tuple[int, int], bytes]) -> StepResult:
        sampled: list[int] = []
        counts: list[int] = []
        pooled: list[PooledOutput] = []
        logprobs: list[TokenLogprobs | None] = []
        prompt_logprobs: list[tuple[int, list[TokenLogprobs]]] = []
        drafts: list[tuple[int, IdArray]] = []
        for part in plan.scheduled:
            row = self.rows[part.slot]
            sampling = row.admitted.params
            if isinstance(sampling, PoolingSpec):
                self._collect(row, sampling, part)
                if part.num_samples:
                    sampled.append(POOLED)
                    counts.append(1)
                    pooled.append(vector(row.states, sampling))
                    row.token_ids.append(POOLED)
                continue
            if sampling.prompt_logprobs is not None:
                prompt_logprobs.append((part.slot, self._prompt_logprobs(row, part)))
            if not part.num_samples:
                continue
            own_masks = [masks.pop((part.slot, index), None) for index in range(part.num_samples)]
            accepted = self._verify(row, sampling, own_masks)
            sampled += accepted
            if plan.num_drafts:
                known = row.token_ids, row.admitted.num_prompt_tokens, row.states[-1]
                row.made_drafts = draft(*known, sampling, self._vocab_size, plan.num_drafts)
                drafts.append((part.slot, row.made_drafts))
            counts.append(len(accepted))
            states = row.states[-len(accepted) :]
            logprobs += [
                None if sampling.logprobs is None else logprob(state, token_id)
                for state, token_id in zip(states, accepted, strict=True)
            ]
        require(not masks, "a mask for a slot that samples nothing")
        shown = logprobs if any(logprobs) else []
        earlier_drafts, self._unread_drafts = self._unread_drafts, []
        if self._drafts_late and not plan.awaits_masks:
            self._unread_drafts = drafts
            drafts = [(slot, pack_ids([UNREAD_DRAFT] * len(token_ids))) for slot, token_ids in drafts]
        return StepResult(
            plan.sequence,
            pack_ids(sampled),
            shown,
            prompt_logprobs,
            counts=counts if plan.draft_tokens else [],
            pooled=pooled,
            drafts=drafts,
            earlier_drafts=earlier_drafts,
        )

    def _verify(self, row: Row, sampling: SamplingSpec, masks: Sequence[bytes | None]) -> list[int]:
        """Draw tokens after the last known one and after each draft, up to the first that is another than drafted."""
        num_known = len(row.token_ids) - row.num_draft_tokens
        draft_tokens, accepted = row.token_ids[num_known:], list[int]()
        for index, mask in enumerate(masks):
            if index and mask is not None and not any(mask):
                break  # nothing may follow the drafts before
            position = num_known + index
            num_outputs = position - row.admitted.num_prompt_tokens
            state = row.states[position - 1]
            accepted.append(draw(state, position, num_outputs, sampling, self._vocab_size, mask))
            if index == len(draft_tokens) or accepted[-1] != draft_tokens[index]:
                break
        # Positions behind them hold states of tokens that the request does not have.
        row.num_returned -= row.num_draft_tokens
        row.num_draft_tokens = 0
        row.token_ids[num_known:] = accepted
        row.num_computed = num_known + len(accepted) - 1
        if self._states is not None and len(accepted) < len(masks):
            row.num_computed = row.start  # its state has no positions: what was right is computed again
        del row.states[num_known + len(accepted) - 1 :]
        return accepted

    def _collect(self, row: Row, spec: PoolingSpec, part: Scheduled) -> None:
        """Verify that a vector is made of positions that this row has computed, all in one step if they must be."""
        name, num_prompt = row.admitted.request_id, row.admitted.num_prompt_tokens
        whole = not self._computes_whole_prompts or (part.start, part.num_tokens) == (0, num_prompt)
        require(whole, f"{name}: a part of a prompt that must be computed whole")
        is_seen = spec.pooling == "last" or part.start == row.num_collected
        require(is_seen, f"{name}: position {row.num_collected} is missing in its vector")
        row.num_collected = part.start + part.num_tokens

    def _prompt_logprobs(self, row: Row, part: Scheduled) -> list[TokenLogprobs]:
        end = min(part.start + part.num_tokens + 1, row.admitted.num_prompt_tokens)
        return [logprob(row.states[index - 1], row.token_ids[index]) for index in range(part.start + 1, end)]


def facts_of(rank: int) -> DeviceFacts:
    """Return what a rank reports; nothing of it is used after the first start."""
    return DeviceFacts(
        rank=rank,
        device_name="simulated",
        total_bytes=0,
        free_bytes=0,
        weights_bytes=0,
        activation_bytes=0,
        cache_groups=[CacheGroupSpec(num_layers=1, block_bytes=1)],
    )
