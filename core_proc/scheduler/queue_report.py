"""Explains in a log line why the first waiting request does not start. Decides nothing."""

from octavo.core_proc.scheduler.scheduler import Scheduler


def explain_waiting(scheduler: Scheduler, now: float) -> str:
    """Return a sentence about the queue. Empty if nothing delays it. Unpacks the first request, which is next anyway.

    Args:
        scheduler: the scheduler; read-only.
        now: time in seconds, on the scheduler's clock.
    """
    head = scheduler.waiting.first
    if head is None or not scheduler.waiting_reason:
        return ""
    pool, config = scheduler.cache.pool, scheduler.config
    running = f"{len(scheduler.running)} requests run"
    match scheduler.waiting_reason:
        case "blocks":
            num_needed = scheduler.cache.num_missing_blocks(head, head.num_tokens)
            why = (
                f"the KV cache is full: it needs {num_needed} blocks, {pool.num_free} of {pool.num_blocks} are free, "
                f"and {running}, which may need more"
            )
        case "states":
            why = f"{running}, and there is no memory for the states of more (--kv-cache-memory-bytes)"
        case "max_num_seqs":
            why = f"{running}, which is the limit (--max-num-seqs)"
        case "budget":
            why = (
                f"prompts before it take all of the {config.max_num_batched_tokens} tokens of a step "
                f"(--max-num-batched-tokens), and {running}"
            )
        case reason:
            why = f"{_OTHER_REASONS.get(reason, reason)}; {running}"
    waits_s = now - head.time_queued
    return f"{len(scheduler.waiting)} requests wait; the first, {head.request_id}, has for {waits_s:.0f} s: {why}"


_OTHER_REASONS = {
    "adapter": "the slots of adapters are taken by those of running requests (--max-loras)",
    "encoder_cache": "running requests attend to all the audio that the workers have room for (--encoder-cache-tokens)",
    "in_flight": "its last step before a preemption is still in flight",
    "isolation": "requests that may have crashed the workers run in isolation first",
    "workers": "the workers are restarting",
}
