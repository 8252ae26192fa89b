"""What to do when the blocks run out: the last in order gives its blocks back and waits again.

A preempted request loses no token. It is recomputed, prompt and outputs alike, when it runs again.
"""

from octavo.core_proc.cache.prefix import PrefixCache
from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.policy import OrderedRequests
from octavo.core_proc.scheduler.stop import is_certain_to_end


def num_reserved_blocks(running: OrderedRequests, cache: PrefixCache, max_model_len: int) -> int:
    """Return the free blocks that running requests need for the tokens they have, computed or not.

    What a prompt still needs is counted whole, so that two prompts that do not fit together never
    start together and then push each other out.
    """
    size, num_reserved = cache.block_size, 0
    # perf: once per step over every running request, so without the functions that say the same elsewhere.
    for request in running:
        num_missing = -(-request.num_tokens // size) - len(request.block_ids)
        if num_missing > 0 and not is_certain_to_end(request, max_model_len):
            num_reserved += num_missing
    return num_reserved


def choose_victim(running: OrderedRequests, cache: PrefixCache, max_model_len: int) -> Request | None:
    """Return the request to preempt before this step, None when the free blocks suffice.

    The first in order is never chosen unless it is alone, and alone it fits: so it always proceeds.
    """
    if num_reserved_blocks(running, cache, max_model_len) <= cache.pool.num_free:
        return None
    return running.last
