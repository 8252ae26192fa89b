"""What each KV cache group keeps of a request. Pure arithmetic, for the planner and the prefix cache.

A request has as many logical blocks in each group: block i of every group is for the tokens from i * block_size on. A
group with a window frees the blocks that no later token reads; `NULL_BLOCK` takes their places in its list.

Layers with a recurrent state are one more group, the last one. Its list holds slots of another pool: entry i is the
slot of the state after the last token computed in block i, `NULL_BLOCK` if that state is not kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.protocol.config import CacheGroupSpec, CachePlan, ResolvedConfig
from octavo.protocol.ids import BlockId

MAX_WINDOWED_CHUNK = 2048
"""Most tokens of one request in one step if there are windows, unless a window is longer. A group with a window holds
all tokens of a step, so larger steps of one request would take more memory than its window."""

NULL_BLOCK: BlockId = -1
"""The place of a block that a request does not hold, because none of its tokens reads it any more."""


MIN_CHECKPOINT_INTERVAL = 256
"""Tokens between two checkpoints of a state, at least. A prompt chunk ends at each: this many tokens are a full step of
four threads. Few prompts share fewer."""

MAX_CHECKPOINT_INTERVAL = 2048

CHECKPOINT_BYTES_PER_TOKEN = 128 << 10
"""Checkpoints of large states are so far apart that they take no more memory per token than the keys and values of a
model with 8 billion parameters, unless this exceeds `MAX_CHECKPOINT_INTERVAL`."""

MIN_CHECKPOINT_TOKENS = 128
"""Tokens that the checkpoint at the end of a prompt must save, compared with the one before it: the rest of the prompt
takes a step of its own."""


def checkpoint_interval(state_bytes: int, block_size: int) -> int:
    """Return the tokens between two checkpoints of a state, a multiple of `block_size`."""
    interval = -(-MIN_CHECKPOINT_INTERVAL // block_size) * block_size
    while interval * CHECKPOINT_BYTES_PER_TOKEN < state_bytes and interval < MAX_CHECKPOINT_INTERVAL:
        interval *= 2
    return interval


@dataclass(frozen=True, slots=True)
class WindowedGroup:
    """A group that does not keep every token."""

    index: int
    window: int
    """A token reads the last `window` positions, its own included; or those of its chunk of `window` positions."""
    is_chunked: bool
    block_size: int
    max_held: int
    """Blocks that a request holds at most: those of its window and of one step."""

    def first_block(self, position: int) -> int:
        """Return the first block that the token at `position`, or a later one, reads."""
        first = position // self.window * self.window if self.is_chunked else max(0, position - self.window + 1)
        return first // self.block_size


@dataclass(frozen=True, slots=True)
class StateGroup:
    """The layers with a recurrent state, and where requests leave checkpoints of it."""

    index: int
    block_size: int
    interval: int
    """A request leaves a checkpoint after so many tokens each, and one before the last block of its prompt; 0: none."""
    has_draft_tokens: bool = False
    """Whether steps verify drafts: the state before them is kept, because they may be wrong."""

    @property
    def max_held(self) -> int:
        """Slots that a request holds at most at a time: the one it reads and the one it writes, if they may differ."""
        return 2 if self.interval or self.has_draft_tokens else 1

    def is_kept(self, position: int, num_prompt_tokens: int) -> bool:
        """Return whether a request leaves a checkpoint of its state after `position` tokens."""
        if not self.interval or not position:
            return False
        return position % self.interval == 0 or position == self._end_of_prompt(num_prompt_tokens)

    def next_kept(self, position: int, num_prompt_tokens: int) -> int:
        """Return the first position after `position` with a checkpoint; there must be any."""
        end = self._end_of_prompt(num_prompt_tokens)
        following = (position // self.interval + 1) * self.interval
        return end if position < end < following else following

    def _end_of_prompt(self, num_prompt_tokens: int) -> int:
        """Return the last block boundary from which an equal prompt can continue; 0 if it is not worth a checkpoint."""
        end = (num_prompt_tokens - 1) // self.block_size * self.block_size
        return end if end % self.interval >= min(MIN_CHECKPOINT_TOKENS, self.interval // 2) else 0


class CacheGroups:
    """The groups of one model.

    Args:
        specs: in the order in which all messages list the groups.
        block_size: tokens of a block.
        max_step_tokens: most tokens of a step.
        max_chunk: most tokens of one request in one step; 0: no limit.
        keeps_checkpoints: whether requests leave checkpoints of their states for others.
        max_draft_tokens: most drafts of one request that a step verifies; 0: it verifies none.
        max_decode_steps: most decode steps of a plan.
    """

    def __init__(
        self,
        specs: Sequence[CacheGroupSpec],
        block_size: int,
        max_step_tokens: int,
        max_chunk: int = 0,
        *,
        keeps_checkpoints: bool = True,
        max_draft_tokens: int = 0,
        max_decode_steps: int = 1,
    ) -> None:
        state_specs = [spec for spec in specs if spec.kind == "state"]
        specs = [spec for spec in specs if spec.kind != "state"]
        self.num_groups = len(specs)
        """Groups that share the pool of blocks."""
        self.state: StateGroup | None = None
        limits = [max_chunk] if max_chunk else []
        if state_specs:
            interval = state_specs[0].window or checkpoint_interval(state_specs[0].block_bytes, block_size)
            self.state = StateGroup(
                self.num_groups, block_size, interval if keeps_checkpoints else 0, max_draft_tokens > 0
            )
            limits += [interval] if keeps_checkpoints else []
        if any(spec.window for spec in specs):
            limits.append(max(MAX_WINDOWED_CHUNK, *(spec.window for spec in specs)))
        self.max_chunk = min(limits, default=0)
        """Most tokens of one request in one step; 0: no limit."""
        # Decodes are not chunks of a prompt: only the step limits them.
        max_decode_tokens = max(1 + max_draft_tokens, max_decode_steps)
        max_step_tokens = max(min([max_step_tokens, *limits]), min(max_step_tokens, max_decode_tokens))
        self.block_size = block_size
        self.full = [index for index, spec in enumerate(specs) if spec.kind == "full"]
        """Indices of the groups that keep every token."""
        self.windowed = [
            WindowedGroup(
                index, spec.window, spec.kind == "chunk", block_size, _max_held(spec, block_size, max_step_tokens)
            )
            for index, spec in enumerate(specs)
            if spec.kind != "full"
        ]
        self.key_suffixes = [bytes([index]) if index else b"" for index in range(self.num_groups)]
        """What follows the hash of a block to make its key in the pool, which knows no groups."""

    @property
    def num_lists(self) -> int:
        """Lists of ids that a request has in all messages: one for each group, and one for its states."""
        return self.num_groups + (self.state is not None)

    @classmethod
    def of(cls, config: ResolvedConfig, specs: Sequence[CacheGroupSpec]) -> "CacheGroups":
        """Return the groups of an engine."""
        return cls(
            specs,
            config.block_size,
            config.max_num_batched_tokens,
            max_chunk=config.long_prefill_token_threshold,
            keeps_checkpoints=config.enable_prefix_caching,
            max_draft_tokens=config.speculation.max_depth if config.speculation else 0,
            max_decode_steps=config.num_scheduler_steps,
        )

    @classmethod
    def of_plan(cls, config: ResolvedConfig, plan: CachePlan) -> "CacheGroups":
        """Return the groups among which a plan divides its blocks."""
        return cls.of(config, plan.cache_groups or [CacheGroupSpec(num_layers=1, block_bytes=0)])

    def max_request_blocks(self, num_tokens: int) -> int:
        """Return how many blocks, of all groups together, a request of `num_tokens` tokens holds at most at a time."""
        return sum(self.max_blocks_per_group(num_tokens))

    def max_blocks_per_group(self, num_tokens: int) -> list[int]:
        """Return how many blocks of each group a request of `num_tokens` tokens holds at most at a time."""
        num_blocks = [-(-num_tokens // self.block_size)] * self.num_groups
        for group in self.windowed:
            num_blocks[group.index] = min(num_blocks[group.index], group.max_held)
        return num_blocks

    def longest_request(self, num_blocks: int, max_model_len: int) -> int:
        """Return the length of the longest request that fits into so many blocks, at most `max_model_len` tokens."""
        low, high = 0, -(-max_model_len // self.block_size)
        while low < high:
            middle = (low + high + 1) // 2
            if self.max_request_blocks(middle * self.block_size) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return min(low * self.block_size, max_model_len)


def _max_held(spec: CacheGroupSpec, block_size: int, max_step_tokens: int) -> int:
    # Consecutive tokens touch the most blocks if the first of them is the last one of its block. A request that decodes
    # gets its next block before it loses one, as if a step computed a block.
    num_tokens = spec.window - 1 + max(max_step_tokens, block_size)
    return (num_tokens + block_size - 2) // block_size + 1
