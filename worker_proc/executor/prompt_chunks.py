"""The prompt logprobs that a step reports, chunk by chunk."""

from collections.abc import Sequence

from octavo.protocol.steps import Scheduled
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.executor.in_flight import PromptChunk
from octavo.worker_proc.executor.runner import Runner


def prompt_chunks(entries: Sequence[tuple[Scheduled, int]], batch: BatchState, runner: Runner) -> list[PromptChunk]:
    """Return the prompt logprobs that entries report; each entry comes with its first row in the step `runner` has
    run."""
    chunks = [_prompt_chunk(entry, first_row, batch, runner) for entry, first_row in entries]
    return [chunk for chunk in chunks if chunk is not None]


def _prompt_chunk(entry: Scheduled, first_row: int, batch: BatchState, runner: Runner) -> PromptChunk | None:
    """Return the logprobs of the prompt tokens that follow an entry's positions; `None` if there are none."""
    row = batch.rows[entry.slot]
    end = min(entry.start + entry.num_tokens + 1, row.num_prompt_tokens)
    token_ids = batch.token_ids(row, entry.start + 1, end)
    if not token_ids:
        return None
    found = runner.prompt_logprobs(row.sampling.spec, token_ids, first_row, entry.start + 1)
    return PromptChunk(row.slot, token_ids, found)
