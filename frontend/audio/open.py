"""`open_transcriber`: returns the transcriber for the model of an engine."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from octavo.frontend.audio.prompt_transcriber import PromptTranscriber
from octavo.frontend.audio.prompts import AudioPrompts
from octavo.frontend.audio.segments import Segment
from octavo.frontend.audio.transcriber import SpeechRequest, Transcriber
from octavo.frontend.audio.words import Word
from octavo.frontend.client import AsyncClient
from octavo.frontend.outputs import RequestOutput
from octavo.protocol.params import OutputKind, SamplingParams


class TranscribedClip(Protocol):
    """A decoded audio clip: the part of it that responses need."""

    @property
    def duration_s(self) -> float:
        """Duration of the complete clip in seconds."""

    @property
    def language(self) -> str:
        """Language code of the clip."""

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of its requests."""

    @property
    def request_id(self) -> str:
        """Id of its transcription."""


class AnyTranscriber(Protocol):
    """Transcribes audio clips; see `Transcriber`."""

    async def read(self, request: SpeechRequest, request_id: str) -> TranscribedClip:
        """Decode an audio clip."""

    def outputs(self, clip: Any, kind: OutputKind) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Yield the outputs of its windows, in order, each with the index of its window."""

    def segments(self, clip: Any, outputs: Sequence[RequestOutput]) -> list[Segment]:
        """Return the segments of a clip that was transcribed with timestamps."""

    def words(self, clip: Any, outputs: Sequence[RequestOutput]) -> list[Word]:
        """Return the words of a clip that was transcribed with words."""


def open_transcriber(client: AsyncClient) -> AnyTranscriber:
    """Return the transcriber for the model of an engine.

    Raises:
        InvalidRequestError: the model does not transcribe.
    """
    return Transcriber(client) if isinstance(client.media, AudioPrompts) else PromptTranscriber(client)
