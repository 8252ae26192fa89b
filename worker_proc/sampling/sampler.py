"""Samples the next token of requests.

Reads their sampling states and never changes them; the batch records the tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.filter_logits import filter_logits
from octavo.kernels.filter_logits import native as native_filter
from octavo.kernels.gumbel_sample import gumbel_sample
from octavo.kernels.logprobs import RowLogprobs, logprobs
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.penalties import apply_penalties
from octavo.kernels.sample import NativeSampler
from octavo.kernels.timestamp_mask import mask_unlikely_text
from octavo.kernels.token_mask import mask_tokens
from octavo.worker_proc.batch.inputs import Ints
from octavo.worker_proc.sampling.state import LARGEST, SamplingState

PASSES_OF_A_DRAW = 5
"""Cost of a draw with noise, in greedy draws. A wide nucleus costs more."""


DrawAgain = Callable[[Tensor], list[int]]
"""Draws tokens for rows of logits, as `Sampler.sample` does."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to sample."""

    state: SamplingState
    position: int
    """Number of tokens before it: prompt and outputs."""
    num_outputs: int
    """Number of outputs before it."""


class Sampler:
    """Samples rows of logits one by one, so that a request's token cannot depend on its neighbours.

    The order: logit bias, min_tokens and bad words, penalties, allowed tokens, timestamp rule. Greedy requests then
    take the most likely token; the others continue with temperature, min_p, top_k, top_p and noise. With a native
    library this is one call for all rows, otherwise it runs through torch. The tokens are the same, unless the edge of
    a nucleus depends on the rounding of probabilities.

    Args:
        vocab_size: number of logits per row.
        library: native library; `None` means torch.
        max_threads: most threads of a native call.
        choose_threads: returns the number of threads for an amount of work (`ThreadPolicy.choose`); all of them by
            default.
    """

    def __init__(
        self,
        vocab_size: int,
        library: NativeLibrary | None = None,
        max_threads: int = 1,
        choose_threads: Callable[[int], int] | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._all_ids_V = torch.arange(vocab_size)
        self._library = library
        self._native = NativeSampler(library, vocab_size, max_threads) if library else None
        self._choose_threads = choose_threads or (lambda work: max_threads)

    def sample(self, logits_RV: Tensor, draws: Sequence[Draw]) -> list[int]:
        """Return one token id per draw, -1 where the largest logit is NaN or infinite.

        `logits_RV` (float32, a row per draw) is not modified.
        """
        if self._native is not None:
            positions_R = np.array([draw.position for draw in draws], dtype=np.int64)
            num_outputs_R = np.array([draw.num_outputs for draw in draws], dtype=np.int64)
            return self.prepare([draw.state for draw in draws], positions_R, num_outputs_R)(logits_RV)
        if all(draw.state.is_greedy and not draw.state.changes_logits(draw.num_outputs) for draw in draws):
            largest = logits_RV.max(dim=1).values
            # The lowest id wins among equals: argmax takes the first.
            return logits_RV.argmax(dim=1).masked_fill_(~largest.isfinite(), -1).tolist()
        return [self._sample_row(logits_V, draw) for logits_V, draw in zip(logits_RV, draws, strict=True)]

    def prepare(self, states: Sequence[SamplingState], positions_R: Ints, num_outputs_R: Ints) -> DrawAgain:
        """Return a function that draws one token for each of these states. It may be called repeatedly.

        Args:
            states: states of the draws.
            positions_R: numbers of tokens before the draws. The arrays may be changed between calls, but not replaced.
            num_outputs_R: numbers of outputs among these tokens.
        """
        if (native := self._native) is None:
            return lambda logits_RV: self.sample(
                logits_RV, list(map(Draw, states, positions_R.tolist(), num_outputs_R.tolist()))
            )
        work = self._vocab_size * sum(1 if state.is_greedy else PASSES_OF_A_DRAW for state in states)
        prepared = native.prepare([state.native_address for state in states], positions_R, num_outputs_R)

        def draw(logits_RV: Tensor) -> list[int]:
            return prepared.sample(logits_RV, self._choose_threads(work))

        return draw

    def logprobs(
        self, logits_RV: Tensor, token_ids: Sequence[int], tops: Sequence[int | Sequence[int]]
    ) -> list[RowLogprobs]:
        """Return the logprobs of one token per row, and either of a number of most likely tokens or of a list of given
        tokens."""
        if self._native is not None:
            num_threads = self._choose_threads(PASSES_OF_A_DRAW * self._vocab_size * len(token_ids))
            return self._native.logprobs(logits_RV, token_ids, tops, num_threads)
        return [logprobs(*row) for row in zip(logits_RV, token_ids, tops, strict=True)]

    def report(
        self, logits_RV: Tensor, draws: Sequence[Draw], token_ids: Sequence[int], changed_RV: Tensor | None = None
    ) -> list[RowLogprobs]:
        """Return the logprobs of some draws in the mode of each request, after `sample` has drawn `token_ids`.

        Args:
            logits_RV: the model's logits, a row per draw.
            draws: draws of requests with logprobs.
            token_ids: drawn tokens.
            changed_RV: logits that were passed to `sample`; `None` means `logits_RV`.
        """
        specs = [draw.state.spec for draw in draws]
        if any(spec.logprobs_mode.startswith("processed") for spec in specs):
            rows = [
                self._processed(changed_V, draw) if draw.state.spec.logprobs_mode.startswith("processed") else logits_V
                for logits_V, changed_V, draw in zip(
                    logits_RV, logits_RV if changed_RV is None else changed_RV, draws, strict=True
                )
            ]
            logits_RV = torch.stack(rows)
        tops = [spec.logprob_token_ids or spec.logprobs or 0 for spec in specs]
        found = self.logprobs(logits_RV, token_ids, tops)
        for index, spec in enumerate(specs):
            if spec.logprobs_mode.endswith("logits"):
                found[index] = as_logits(found[index], logits_RV[index], token_ids[index])
        return found

    def _processed(self, logits_V: Tensor, draw: Draw) -> Tensor:
        """Return the logits that a draw chooses from, minus infinity for tokens that it cannot choose."""
        state, spec = draw.state, draw.state.spec
        if state.changes_logits(draw.num_outputs):
            logits_V = changed_logits(logits_V, state, draw.num_outputs)
            is_ruled_out = logits_V <= -LARGEST
            if not is_ruled_out.all():
                logits_V.masked_fill_(is_ruled_out, -torch.inf)
        if state.is_greedy:
            return logits_V
        logits_V = logits_V / spec.temperature
        if not state.has_filters:
            return logits_V
        kept = self._filter(logits_V.contiguous(), draw)
        return torch.full_like(logits_V, -torch.inf).index_copy_(0, kept, logits_V[kept])

    def _filter(self, logits_V: Tensor, draw: Draw) -> Tensor:
        spec = draw.state.spec
        if self._library is None:
            return filter_logits(logits_V, top_k=spec.top_k, top_p=spec.top_p, min_p=spec.min_p)
        return native_filter.filter_logits(
            self._library, logits_V, top_k=spec.top_k, top_p=spec.top_p, min_p=spec.min_p
        )

    def _sample_row(self, logits_V: Tensor, draw: Draw) -> int:
        state, spec = draw.state, draw.state.spec
        if state.changes_logits(draw.num_outputs):
            logits_V = changed_logits(logits_V, state, draw.num_outputs)
        if not logits_V.max().isfinite():
            return -1
        if state.is_greedy:
            return int(logits_V.argmax())
        logits_V = logits_V / spec.temperature
        ids = self._all_ids_V
        if state.has_filters:
            ids = filter_logits(logits_V, top_k=spec.top_k, top_p=spec.top_p, min_p=spec.min_p)
            logits_V = logits_V[ids]
        return gumbel_sample(logits_V, ids, seed=spec.seed, position=draw.position)


def changed_logits(logits_V: Tensor, state: SamplingState, num_outputs: int) -> Tensor:
    """Return a copy of one row of logits with all of a request's changes. Finite logits stay finite."""
    logits_V = logits_V.clone()
    if state.bias_ids.numel():
        logits_V[state.bias_ids] += state.bias_values
    if num_outputs < state.spec.min_tokens:
        logits_V[state.withheld_ids] = -torch.inf
    if state.bad_words:
        logits_V[state.bad_words.tensor()] = -torch.inf
    if state.penalties:
        apply_penalties(
            logits_V,
            *state.penalties.tensors(),
            repetition=state.repetition_penalty,
            frequency=state.spec.frequency_penalty,
            presence=state.spec.presence_penalty,
        )
    logits_V.clamp_(-LARGEST, LARGEST)
    if state.allowed_W is not None:
        mask_tokens(logits_V, state.allowed_W)
    if state.first_timestamp:
        mask_unlikely_text(logits_V, state.first_timestamp)
    return logits_V


def as_logits(row: RowLogprobs, logits_V: Tensor, token_id: int) -> RowLogprobs:
    """Return the logits in place of the logprobs."""
    return replace(row, token_logprob=float(logits_V[token_id]), top_logprobs=logits_V[row.top_token_ids].tolist())
