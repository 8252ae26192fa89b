"""One row of the persistent batch: what the worker remembers of a running request between steps.

Makes no decisions: the core decides which tokens are computed and when a request ends.
"""

from dataclasses import dataclass, field

from octavo.protocol.alignment import AlignmentSpec
from octavo.protocol.params import PoolingSpec, SamplingSpec
from octavo.protocol.prompt_embeds import tokens_outside
from octavo.protocol.steps import Admitted
from octavo.worker_proc.batch.columns import SlotColumns, Trait
from octavo.worker_proc.pooling.collected import Collected
from octavo.worker_proc.sampling.state import SamplingState

_NOT_SAMPLED = SamplingSpec(max_tokens=1, seed=0)


@dataclass(slots=True)
class Row:
    """A running request, except its token ids and block tables, which are in the tables of the batch."""

    slot: int
    request_id: str
    num_prompt_tokens: int
    num_blocks: list[int]
    """Number of blocks in each cache group."""
    sampling: SamplingState
    columns: SlotColumns
    """Columns of the batch, which hold the numbers that change with every step."""
    pooling: PoolingSpec | None = None
    """Pooling spec of a request that pools; `sampling` is then unused."""
    alignment: AlignmentSpec | None = None
    """Alignment spec of a request that aligns; `sampling` is then unused."""
    collected: Collected = field(default_factory=Collected)
    """Partial result of pooling or alignment."""
    later_masks: dict[int, bytes | memoryview] = field(default_factory=dict)
    """Masks of draws after drafts, by the number of drafts before the draw."""

    @property
    def num_known_tokens(self) -> int:
        """Prompt and outputs, including tokens that steps in flight sample. Valid only while the row is in the
        batch."""
        return int(self.columns.num_known_S[self.slot])

    def sampling_at(self, position: int) -> SamplingState:
        """Return the sampling state for the draw at a position, with the mask of this draw. The draw may follow
        drafts."""
        if not self.later_masks and not self.sampling.has_own_mask:
            return self.sampling
        num_draft_tokens = position - self.num_known_tokens
        return self.sampling.with_mask(self.later_masks.get(num_draft_tokens)) if num_draft_tokens else self.sampling

    @property
    def traits(self) -> Trait:
        """What steps must do for this request."""
        spec, bad_words, speech = self.sampling.spec, self.sampling.bad_words, self.sampling.speech
        traits = Trait.IS_ALIGNED if self.alignment is not None else Trait(0)
        if any(one is not None for one in (self.sampling.penalties, bad_words, speech)):
            traits |= Trait.TRACKS_TOKENS
        if bad_words is not None and bad_words.depends_on_output:
            traits |= Trait.HAS_LONG_BAD_WORDS
        if speech is not None:
            traits |= Trait.HAS_TIMESTAMPS if self.sampling.first_timestamp else Trait.HAS_SPEECH_RULES
        if spec.logprobs is not None:
            traits |= Trait.REPORTS_LOGPROBS
        if spec.prompt_logprobs is not None:
            traits |= Trait.REPORTS_PROMPT_LOGPROBS
        return traits

    @classmethod
    def admit(cls, admitted: Admitted, vocab_size: int, columns: SlotColumns) -> "Row":
        """Make the row of a request that enters the batch, for the first time or after a preemption."""
        # Prompt embeddings have no tokens that a penalty could count.
        prompt = tokens_outside(admitted.embed_spans, admitted.token_ids[: admitted.num_prompt_tokens])
        output = admitted.token_ids[admitted.num_prompt_tokens :].tolist()
        pooling = admitted.params if isinstance(admitted.params, PoolingSpec) else None
        alignment = admitted.params if isinstance(admitted.params, AlignmentSpec) else None
        spec = admitted.params if isinstance(admitted.params, SamplingSpec) else _NOT_SAMPLED
        return cls(
            slot=admitted.slot,
            request_id=admitted.request_id,
            num_prompt_tokens=admitted.num_prompt_tokens,
            num_blocks=[len(block_ids) for block_ids in admitted.block_ids],
            sampling=SamplingState.prepare(spec, prompt, output, vocab_size),
            columns=columns,
            pooling=pooling,
            alignment=alignment,
        )
