"""What whole and streamed answers have in common: the server's settings and the request's."""

from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from octavo.frontend.conversation.prepare import AnswerRendering
from octavo.frontend.http.fingerprint import Fingerprint
from octavo.frontend.http.render.logprobs import TokenNames
from octavo.frontend.outputs import CompletionOutput, WeightRange
from octavo.frontend.receipts.receipt import Receipt
from octavo.frontend.receipts.recorder import Recorder
from octavo.protocol.config import ServerConfig


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """Settings of this server that all answers depend on."""

    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    names_are_ids: bool = False
    """Logprobs write tokens as "token_id:ID" unless the request says otherwise."""
    has_metrics: bool = False
    """How long a request took."""

    @classmethod
    def of(cls, config: ServerConfig) -> "AnswerSettings":
        """Return the settings that the flags describe."""
        return cls(
            fingerprint=Fingerprint(config.fingerprint_mode, config.fingerprint_value),
            names_are_ids=config.return_tokens_as_token_ids,
            has_metrics=config.enable_per_request_metrics,
        )


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """Identity of an answer, and what it contains."""

    id: str
    """`chatcmpl-...` or `cmpl-...`."""
    created: int
    """Seconds since the epoch."""
    model: str
    names: TokenNames
    fingerprint: str | None = None
    num_logprobs: int | None = None
    """None: no logprobs."""
    names_logprobs: bool = False
    """The caller has named the tokens: all of them are shown."""
    chat: AnswerRendering = field(default_factory=AnswerRendering)
    """Chat: how the output becomes a message."""
    has_token_ids: bool = False
    has_weight_versions: bool = False
    """Also if one version of the weights has drawn all tokens."""
    has_usage: bool = False
    """In streams: a last chunk with the usage."""
    has_running_usage: bool = False
    """In streams: the usage so far in every chunk."""
    has_metrics: bool = False
    """How long it took, where there is one choice; in streams with the usage."""
    recorder: Recorder | None = None
    """Makes the receipt of the answer; None: there is none."""

    @property
    def has_receipt(self) -> bool:
        """Whether the answer ends in its receipt."""
        return self.recorder is not None and self.recorder.is_shown

    @property
    def receipt(self) -> Receipt | UnsetType:
        """The receipt of a complete answer; UNSET: the caller wants none."""
        return UNSET if self.recorder is None else self.recorder.shown

    @property
    def shows_tokens(self) -> bool:
        """Whether chunks of streams say something about each token."""
        return self.has_token_ids or self.has_weight_versions

    def weight_versions(self, choice: CompletionOutput) -> list[WeightRange] | UnsetType:
        """Return which weights drew the tokens of a choice, if the caller wants to know or several did."""
        ranges = choice.weight_versions
        return ranges if self.has_weight_versions or len(ranges) > 1 else UNSET
