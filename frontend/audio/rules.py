"""`speech_rules`: which tokens a request to a speech model may draw."""

from octavo.frontend.audio.speech_tokens import SpeechTokens
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.params import SamplingParams
from octavo.protocol.speech_rules import SpeechRules


def speech_rules(params: SamplingParams, config: ResolvedConfig) -> SpeechRules:
    """Return the rules that `params.speech_rules` selects.

    Raises:
        InvalidRequestError: the model does not transcribe, or another parameter conflicts with the rules.
    """
    media = config.model.media
    if media is None or not media.attended_rows:
        raise InvalidRequestError("speech_rules: this model does not transcribe audio: leave it out", "speech_rules")
    for name in ("allowed_token_ids", "structured_outputs"):
        if getattr(params, name) is not None:
            raise InvalidRequestError(f"{name} cannot be combined with speech_rules: leave one of them out", name)
    return SpeechTokens.of(media.processor_path).rules(params.speech_rules == "timestamps")
