"""Settings of the server and of the request that unary and streamed responses share."""

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
    """Server settings that all responses depend on."""

    fingerprint: Fingerprint = field(default_factory=Fingerprint)
    names_are_ids: bool = False
    """Whether logprobs write tokens as "token_id:ID" unless the request says otherwise."""
    has_metrics: bool = False
    """Whether responses contain timing metrics of the request."""

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
    """Identity and contents of a response."""

    id: str
    """Id of the response: `chatcmpl-...` or `cmpl-...`."""
    created: int
    """Unix time of the response in seconds."""
    model: str
    names: TokenNames
    fingerprint: str | None = None
    num_logprobs: int | None = None
    """Number of alternatives per token; `None` if no logprobs are requested."""
    names_logprobs: bool = False
    """Whether the client has named the tokens whose logprobs it wants: all of them are shown."""
    chat: AnswerRendering = field(default_factory=AnswerRendering)
    """For chat: how outputs become messages."""
    has_token_ids: bool = False
    has_weight_versions: bool = False
    """Whether to show weight versions even if a single version drew all tokens."""
    has_usage: bool = False
    """In streams: whether a last chunk has the usage."""
    has_running_usage: bool = False
    """In streams: whether every chunk has the usage so far."""
    has_metrics: bool = False
    """Whether to report timings if there is one choice; streams report them together with the usage."""
    recorder: Recorder | None = None
    """Makes the receipt of the response; `None` if no receipt is made."""

    @property
    def has_receipt(self) -> bool:
        """Whether the response ends with its receipt."""
        return self.recorder is not None and self.recorder.is_shown

    @property
    def receipt(self) -> Receipt | UnsetType:
        """The receipt of a complete response; UNSET if the client wants none."""
        return UNSET if self.recorder is None else self.recorder.shown

    @property
    def shows_tokens(self) -> bool:
        """Whether chunks of streams carry data about each token."""
        return self.has_token_ids or self.has_weight_versions

    def weight_versions(self, choice: CompletionOutput) -> list[WeightRange] | UnsetType:
        """Return which weights drew the tokens of a choice, if the client wants to know or several versions did."""
        ranges = choice.weight_versions
        return ranges if self.has_weight_versions or len(ranges) > 1 else UNSET
