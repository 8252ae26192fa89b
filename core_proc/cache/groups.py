"""What each KV cache group keeps of a request. Pure arithmetic, for the planner and the prefix cache.

A request has the same number of logical blocks in each group: block i of every group holds the tokens from i *
block_size on. A group with a window frees blocks that no later token reads; `NULL_BLOCK` replaces them in its list.

Layers with a recurrent state form one more group, the last one. Its list holds slots of another pool: entry i is the
slot of the state after the last token computed in block i, or `NULL_BLOCK` if that state is not kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.protocol.config import CacheGroupSpec, CachePlan, ResolvedConfig
from octavo.protocol.ids import BlockId

MAX_WINDOWED_CHUNK = 2048
"""Most tokens of one request in one step if there are windows, unless a window is longer. A group with a window holds
all tokens of a step, so larger chunks of one request would need more memory than its window."""

NULL_BLOCK: BlockId = -1
"""Replaces a block that a request no longer holds, because none of its tokens reads the block any more."""


MIN_CHECKPOINT_INTERVAL = 256
"""Least number of tokens between two checkpoints of a state. A prompt chunk ends at each checkpoint: this many tokens
are a full step for four threads. Shorter common prefixes are rare."""

MAX_CHECKPOINT_INTERVAL = 2048

CHECKPOINT_BYTES_PER_TOKEN = 128 << 10
"""Checkpoints of large states are spaced so that they take no more memory per token than the KV of a model with 8
billion parameters, unless the interval exceeds `MAX_CHECKPOINT_INTERVAL`."""

MIN_CHECKPOINT_TOKENS = 128
"""Least number of tokens that a checkpoint at the end of a prompt must save, compared with the previous checkpoint. It
is not free: the rest of the prompt then needs its own step."""


def checkpoint_interval(state_bytes: int, block_size: int) -> int:
    """Return the number of tokens between two checkpoints of a state, a multiple of `block_size`."""
    interval = -(-MIN_CHECKPOINT_INTERVAL // block_size) * block_size
    while interval * CHECKPOINT_BYTES_PER_TOKEN < state_bytes and interval < MAX_CHECKPOINT_INTERVAL:
        interval *= 2
    return interval


@dataclass(frozen=True, slots=True)
class WindowedGroup:
    """A cache group that does not keep every token."""

    index: int
    window: int
    """A token reads the last `window` positions including its own, or the positions of its chunk of `window`
    positions."""
    is_chunked: bool
    block_size: int
    max_held: int
    """Most blocks that a request holds: those of its window and of one step."""

    def first_block(self, position: int) -> int:
        """Return the first block that the token at `position` or any later token reads."""
        first = position // self.window * self.window if self.is_chunked else max(0, position - self.window + 1)
        return first // self.block_size


@dataclass(frozen=True, slots=True)
class StateGroup:
    """The layers with a recurrent state, and where requests leave checkpoints of it."""

    index: int
    block_size: int
    interval: int
    """Tokens between two checkpoints of a request, which also leaves one before the last block of its prompt. 0 if
    there are no checkpoints."""
    has_draft_tokens: bool = False
    """Whether steps verify drafts. If so, the state before the drafts is kept, because they may be rejected."""

    @property
    def max_held(self) -> int:
        """Most slots that a request holds at a time: the slot that it reads, and the one that it writes if that can
        differ."""
        return 2 if self.interval or self.has_draft_tokens else 1

    def is_kept(self, position: int, num_prompt_tokens: int) -> bool:
        """Return whether a request leaves a checkpoint of its state after `position` tokens."""
        if not self.interval or not position:
            return False
        return position % self.interval == 0 or position == self._end_of_prompt(num_prompt_tokens)

    def next_kept(self, position: int, num_prompt_tokens: int) -> int:
        """Return the first position after `position` with a checkpoint. Checkpoints must be enabled."""
        end = self._end_of_prompt(num_prompt_tokens)
        following = (position // self.interval + 1) * self.interval
        return end if position < end < following else following

    def _end_of_prompt(self, num_prompt_tokens: int) -> int:
        """Return the last block boundary from which an equal prompt can continue; 0 if it is not worth a checkpoint."""
        end = (num_prompt_tokens - 1) // self.block_size * self.block_size
        return end if end % self.interval >= min(MIN_CHECKPOINT_TOKENS, self.interval // 2) else 0


class CacheGroups:
    """The cache groups of one model.

    Args:
        specs: the groups, in the order used in all messages.
        block_size: tokens per block.
        max_step_tokens: most tokens of a step.
        max_chunk: most tokens of one request in one step; 0: no limit.
        keeps_checkpoints: whether requests leave checkpoints of their states for other requests.
        max_draft_tokens: most drafts of one request that a step verifies; 0 if steps verify none.
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
        """Number of groups that share the block pool."""
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
        # Decodes are not prompt chunks: only the token budget of the step limits them.
        max_decode_tokens = min(max_step_tokens, max(1 + max_draft_tokens, max_decode_steps))
        # A decoding request passes blocks while it fills its last one, but frees them only after it has got more.
        max_new_tokens = max(min([max_step_tokens, *limits]), block_size - 1 + max_decode_tokens)
        self.block_size = block_size
        self.full = [index for index, spec in enumerate(specs) if spec.kind == "full"]
        """Indices of the groups that keep every token."""
        self.windowed = [
            WindowedGroup(
                index, spec.window, spec.kind == "chunk", block_size, _max_held(spec, block_size, max_new_tokens)
            )
            for index, spec in enumerate(specs)
            if spec.kind != "full"
        ]
        self.key_suffixes = [bytes([index]) if index else b"" for index in range(self.num_groups)]
        """Suffix that is appended to a block's hash to form its key in the pool, which knows no groups."""

    @property
    def num_lists(self) -> int:
        """Number of id lists per request in all messages: one for each group, and one for states if there are any."""
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
        """Return the most blocks, over all groups, that a request of `num_tokens` tokens holds at a time."""
        return sum(self.max_blocks_per_group(num_tokens))

    def max_blocks_per_group(self, num_tokens: int) -> list[int]:
        """Return the most blocks per group that a request of `num_tokens` tokens holds at a time."""
        num_blocks = [-(-num_tokens // self.block_size)] * self.num_groups
        for group in self.windowed:
            num_blocks[group.index] = min(num_blocks[group.index], group.max_held)
        return num_blocks

    def longest_request(self, num_blocks: int, max_model_len: int) -> int:
        """Return the length of the longest request that fits into this many blocks, at most `max_model_len` tokens."""
        low, high = 0, -(-max_model_len // self.block_size)
        while low < high:
            middle = (low + high + 1) // 2
            if self.max_request_blocks(middle * self.block_size) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return min(low * self.block_size, max_model_len)


def _max_held(spec: CacheGroupSpec, block_size: int, max_new_tokens: int) -> int:
    # Consecutive tokens touch the most blocks if the first token is the last one of its block.
    num_tokens = spec.window - 1 + max_new_tokens
    return (num_tokens + block_size - 2) // block_size + 1
