"""`WholeSpectrogram`: all frames of an audio clip, from which transcription with timestamps cuts windows one by one.

If the end of a window cuts a segment, Whisper draws only the start of the segment. The next window therefore begins at
that start, and not where the previous window ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.frontend.audio.process import FEATURES
from octavo.frontend.audio.prompts import AudioWindow, DecodedAudio
from octavo.frontend.audio.segments import FRAMES_PER_SECOND, num_heard_rows
from octavo.frontend.audio.speech_tokens import SpeechTokens
from octavo.protocol.buffers import Buffer
from octavo.protocol.media import MediaItem, MediaTensor, digest_of

FRAMES_PER_ROW = 2
"""Frames per row of the encoder's output; a row is also the step of timestamps."""
_FRAME_BYTES = 4


@dataclass(frozen=True, slots=True)
class WholeSpectrogram:
    """The spectrogram of a complete audio clip."""

    item: MediaItem
    """Its tensor is float32, shape (bands, frames); it has at least the clip's frames."""
    num_frames: int
    """Number of frames of the clip."""

    @classmethod
    def of(cls, clip: DecodedAudio) -> "WholeSpectrogram":
        """Return the spectrogram of a clip that was read without cutting it into windows."""
        (window,) = clip.windows
        # Rounding: a sample is a 160th of a frame, and 0.58 * 100 is 57.999...
        return cls(window.item, max(1, int(FRAMES_PER_SECOND * clip.duration_s + 1e-6)))

    def window(self, start: int) -> AudioWindow:
        """Return the window that begins at frame `start`; it is padded with zeros at the end, as in `transformers`."""
        tensor = self.item.tensors[FEATURES]
        (num_bands, num_stored), size = tensor.shape, FRAMES_PER_ROW * self.item.attended_rows
        end = min(start + size, num_stored)
        padding = bytes(_FRAME_BYTES * (start + size - end))
        data = memoryview(tensor.data.data)
        parts: list[memoryview | bytes] = []
        for first in range(0, num_bands * num_stored, num_stored):
            parts += [data[_FRAME_BYTES * (first + start) : _FRAME_BYTES * (first + end)], padding]
        tensors = {FEATURES: MediaTensor(tensor.dtype, [num_bands, size], Buffer(b"".join(parts)))}
        item = MediaItem([], digest_of(tensors), tensors, attended_rows=self.item.attended_rows, kind=self.item.kind)
        num_heard = min(size, self.num_frames - start)
        return AudioWindow(start / FRAMES_PER_SECOND, num_heard / FRAMES_PER_SECOND, item)

    def next_start(self, window: AudioWindow, token_ids: Sequence[int], tokens: SpeechTokens) -> int:
        """Return the frame at which the next window begins; `num_frames` at the end of the clip.

        Args:
            window: window of this clip.
            token_ids: drawn by the model for this window.
            tokens: tokens of the model.
        """
        advance = FRAMES_PER_ROW * num_heard_rows(token_ids, tokens, window.item.attended_rows)
        return min(round(FRAMES_PER_SECOND * window.start_s) + advance, self.num_frames)
