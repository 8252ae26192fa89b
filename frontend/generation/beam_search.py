"""Beam search: which beams to continue, which have finished, and when to stop. Computes no logprobs, sends nothing.

The rules are those of transformers' `GenerationMixin._beam_search` (5.23), so the same weights give the same beams. All
continuations of the open beams are ranked. Those among the first `beam_width` that end are candidates for the result.
The first `beam_width` that do not end become the next open beams.
"""

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from octavo.protocol.events import TokenLogprobs
from octavo.protocol.params import BeamSearchParams


@dataclass(frozen=True, slots=True)
class Step:
    """One token of a beam, with the likely tokens at its position."""

    entry: TokenLogprobs
    place: int
    """Rank of the token in `entry`, from 1."""
    weight_version: int = 0
    """Version of the weights that computed `entry`."""

    @property
    def token_id(self) -> int:
        """The token."""
        return self.entry.token_ids[self.place]

    @property
    def logprob(self) -> float:
        """Logprob of the token."""
        return self.entry.logprobs[self.place]


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence of tokens, finished or not."""

    steps: tuple[Step, ...]
    logprob: float
    """Sum of the logprobs of all tokens."""
    is_stopped: bool = False
    """Whether the last token is an end-of-sequence token."""

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the beam, without the prompt."""
        return [step.token_id for step in self.steps]


class BeamSearch:
    """One search, step by step. The caller passes the likely tokens after each beam in `open` to `advance`.

    Args:
        params: the search parameters; their `max_tokens` fits the model.
        eos_token_ids: tokens that end a sequence.
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: Collection[int]) -> None:
        self.open: list[Beam] = [Beam((), 0.0)]
        """Beams to continue, best first."""
        self.is_done = False
        self.num_candidates = params.beam_width + len(eos_token_ids)
        """Number of likely tokens needed after each beam, so that at least `beam_width` of them do not end the
        sequence."""
        self._params = params
        self._eos_token_ids = frozenset(eos_token_ids)
        self._ended: list[Beam] = []
        """Finished beams, at most `beam_width`, best first."""

    def advance(self, entries: Sequence[TokenLogprobs], versions: Sequence[int] | None = None) -> None:
        """Extend the open beams by one token.

        Args:
            entries: one per open beam, with `num_candidates` alternatives by descending logprob.
            versions: the version of the weights that computed each entry. `None`: version 0.
        """
        continuations = [
            [(beam.logprob + step.logprob, beam, step) for step in _steps(entry, version)]
            for beam, entry, version in zip(self.open, entries, versions or [0] * len(entries), strict=True)
        ]
        width, length = self._params.beam_width, len(self.open[0].steps) + 1
        is_last = length == self._params.max_tokens
        ended, going_on = list(self._ended), []
        # Each list is sorted already. For ties, the better beam comes first, then the lower token id.
        for place, one in enumerate(heapq.merge(*continuations, key=lambda one: -one[0])):
            beam = self._beam(*one)
            if place < width and (is_last or beam.is_stopped):
                ended.append(beam)
            if not beam.is_stopped:
                going_on.append(beam)
            if len(going_on) == width:
                break
        self._ended = sorted(ended, key=lambda beam: -self.score(beam))[:width]
        self.open = [] if is_last else going_on
        self.is_done = not self.open or self._is_decided(length)

    def score(self, beam: Beam) -> float:
        """Return the score for ranking finished beams; higher is better."""
        return self._normalized(beam.logprob, len(beam.steps))

    def best(self) -> list[Beam]:
        """Return at most `beam_width` beams, best first: finished beams, and open ones if the search was aborted."""
        beams = self._ended if self.is_done else [*self._ended, *(beam for beam in self.open if beam.steps)]
        return sorted(beams, key=lambda beam: -self.score(beam))[: self._params.beam_width]

    def _beam(self, logprob: float, beam: Beam, step: Step) -> Beam:
        return Beam((*beam.steps, step), logprob, step.token_id in self._eos_token_ids)

    def _normalized(self, logprob: float, length: int) -> float:
        return float(logprob / length**self._params.length_penalty)

    def _is_decided(self, length: int) -> bool:
        """Return whether no open beam is expected to beat the worst finished beam."""
        if len(self._ended) < self._params.beam_width:
            return False
        if self._params.early_stopping is True:
            return True
        is_exact = self._params.early_stopping == "never" and self._params.length_penalty > 0.0
        best_length = self._params.max_tokens if is_exact else length
        return self._normalized(self.open[0].logprob, best_length) <= self.score(self._ended[-1])


def _steps(entry: TokenLogprobs, version: int) -> Iterator[Step]:
    """Yield the likely tokens at one position, by descending logprob."""
    return (Step(entry, place, version) for place in range(1, len(entry.token_ids)))
