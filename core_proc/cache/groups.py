"""What each KV cache group keeps of a request. Pure arithmetic, for the planner and the prefix cache.

A request has as many logical blocks in each group: block i of every group is for the tokens from i * block_size on. A
group with a window frees the blocks that no later token reads; `NULL_BLOCK` takes their places in its list.
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


class CacheGroups:
    """The groups of one model.

    Args:
        specs: in the order in which all messages list the groups.
        block_size: tokens of a block.
        max_step_tokens: most tokens of a step.
        max_chunk: most tokens of one request in one step; 0: no limit.
    """

    def __init__(
        self, specs: Sequence[CacheGroupSpec], block_size: int, max_step_tokens: int, max_chunk: int = 0
    ) -> None:
        self.num_groups = len(specs)
        limits = [max_chunk] if max_chunk else []
        if any(spec.window for spec in specs):
            limits.append(max(MAX_WINDOWED_CHUNK, *(spec.window for spec in specs)))
        self.max_chunk = min(limits, default=0)
        """Most tokens of one request in one step; 0: no limit."""
        max_step_tokens = min([max_step_tokens, *limits])
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

    @classmethod
    def of(cls, config: ResolvedConfig, specs: Sequence[CacheGroupSpec]) -> "CacheGroups":
        """Return the groups of an engine."""
        return cls(
            specs, config.block_size, config.max_num_batched_tokens, max_chunk=config.long_prefill_token_threshold
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
