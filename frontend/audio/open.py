"""`open_transcriber`: what transcribes sounds with the model of an engine."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from octavo.frontend.audio.prompts import AudioPrompts
from octavo.frontend.audio.segments import Segment
from octavo.frontend.audio.sound_transcriber import SoundTranscriber
from octavo.frontend.audio.transcriber import SpeechRequest, Transcriber
from octavo.frontend.audio.words import Word
from octavo.frontend.client import AsyncClient
from octavo.frontend.outputs import RequestOutput
from octavo.protocol.params import OutputKind, SamplingParams


class TranscribedSound(Protocol):
    """A decoded sound, as answers about it need it."""

    @property
    def duration_s(self) -> float:
        """Of all of it."""

    @property
    def language(self) -> str:
        """Its code."""

    @property
    def params(self) -> SamplingParams:
        """Of its requests."""

    @property
    def request_id(self) -> str:
        """Of its transcription."""


class AnyTranscriber(Protocol):
    """Transcribes sounds: see `Transcriber`."""

    async def read(self, request: SpeechRequest, request_id: str) -> TranscribedSound:
        """Return a sound that can be transcribed."""

    def outputs(self, sound: Any, kind: OutputKind) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Yield the outputs of its windows, with the index of the window and in their order."""

    def segments(self, sound: Any, outputs: Sequence[RequestOutput]) -> list[Segment]:
        """Return the segments of a sound that was transcribed with timestamps."""

    def words(self, sound: Any, outputs: Sequence[RequestOutput]) -> list[Word]:
        """Return the words of a sound that was transcribed with words."""


def open_transcriber(client: AsyncClient) -> AnyTranscriber:
    """Return what transcribes sounds.

    Raises:
        InvalidRequestError: the model does not transcribe.
    """
    return Transcriber(client) if isinstance(client.media, AudioPrompts) else SoundTranscriber(client)
