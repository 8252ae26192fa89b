"""`AudioPrompts`: prompts of models that transcribe speech, each with the audio that its tokens attend to."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import msgspec
from msgspec import structs

from octavo.frontend.audio.process import FEATURES
from octavo.frontend.audio.samples import samples_of
from octavo.frontend.audio.wire import AudioJob, AudioResult, AudioSetup, Window
from octavo.frontend.media.child_processes import ChildProcesses
from octavo.frontend.media.download import MediaError
from octavo.frontend.media.live_bytes import LiveBuffer, LiveMedia
from octavo.frontend.media.parts import MediaOptions, MediaSource, media_parts
from octavo.frontend.media.precomputed import PrecomputedRows
from octavo.frontend.media.prompts import Encode, MediaPrompt
from octavo.frontend.media.sources import FIELD
from octavo.frontend.text.messages import Message
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.media import Kind, MediaItem, MediaTensor

_NO_OPTIONS = MediaOptions()


@dataclass(frozen=True, slots=True)
class AudioWindow:
    """A part of an audio clip that the model reads at once."""

    start_s: float
    duration_s: float
    item: MediaItem

    def without_frames(self) -> "AudioWindow":
        """Return the window without its frames, which take much memory."""
        return replace(self, item=structs.replace(self.item, tensors={}))


@dataclass(frozen=True, slots=True)
class DecodedAudio:
    """A decoded audio clip. Its windows count toward `--max-media-bytes` as long as any of them is referenced."""

    duration_s: float
    windows: list[AudioWindow]


class AudioPrompts:
    """Makes the prompts of a model that attends to audio. Belongs to one event loop.

    Args:
        config: configuration of the engine.
        encode: tokenizes a text; see `AsyncClient.tokenize`.
    """

    kinds: Collection[Kind] = frozenset[Kind](["audio"])

    def __init__(self, config: ResolvedConfig, encode: Encode) -> None:
        assert config.media is not None and config.model.media is not None, "a model that transcribes speech"
        self._attended_rows, self._encode = config.media.attended_rows, encode
        self._live = LiveMedia(config.media.max_live_bytes)
        self._processes = ChildProcesses(
            "octavo.frontend.audio.process",
            AudioSetup(os.getpid(), config.model.media.processor_path, config.media.max_audio_s),
            config.media.decode_timeout_s,
            "audio needs pip install 'octavo[audio]', and the model's preprocessor_config.json",
        )

    async def extract(self, messages: Sequence[Message]) -> tuple[list[Message], list[MediaSource]]:
        """Return a conversation unchanged.

        Raises:
            InvalidRequestError: the conversation has media.
        """
        for _, path in media_parts(messages):
            raise InvalidRequestError(
                f"{path}: this model transcribes audio, and holds no conversations about media", path
            )
        return list(messages), []

    async def of_text(
        self,
        text: str,
        sources: Sequence[MediaSource],
        *,
        adds_special_tokens: bool,
        options: MediaOptions = _NO_OPTIONS,
    ) -> MediaPrompt:
        """Return a prompt of text: see `of_tokens`."""
        token_ids = await self._encode(text, add_special_tokens=False)
        return await self.of_tokens(token_ids, sources, options)

    async def of_tokens(
        self, token_ids: Sequence[int], sources: Sequence[MediaSource], options: MediaOptions = _NO_OPTIONS
    ) -> MediaPrompt:
        """Return the prompt of a decoder's tokens and one audio clip.

        Raises:
            InvalidRequestError: the clip cannot be used or is longer than a window, or there are several clips.
            OverloadedError: live requests already hold too many bytes.
        """
        if len(sources) != 1 or options.processor_kwargs or sources[0].uuid:
            raise InvalidRequestError(
                f"{FIELD} needs one audio clip for this model, and neither mm_processor_kwargs nor a uuid", FIELD
            )
        (source,) = sources
        clip = await self.read(source, max_windows=1)
        return MediaPrompt(list(token_ids), (clip.windows[0].item,))

    async def read(self, source: MediaSource, *, max_windows: int = 0, is_whole: bool = False) -> DecodedAudio:
        """Decode an audio clip and return its windows.

        Args:
            source: the clip.
            max_windows: clips with more windows are rejected. 0: only `--max-audio-seconds` limits them.
            is_whole: do not cut the clip; see `AudioJob.is_whole`.

        Raises:
            InvalidRequestError: the clip cannot be used; the message says why.
            OverloadedError: live requests already hold too many bytes.
            ConfigError: the processes that decode audio do not start.
        """
        try:
            if isinstance(source.value, PrecomputedRows):
                raise MediaError("this model has no audio rows in its prompts: send the audio clip itself")
            job = AudioJob(*samples_of(source.value), max_windows, is_whole)
            result = await self._processes.ask(msgspec.msgpack.encode(job), AudioResult)
            if result.fault:
                raise MediaError(result.fault)
        except MediaError as error:
            raise InvalidRequestError(f"{source.path}: the audio cannot be used: {error}", source.path) from None
        windows = [AudioWindow(one.start_s, one.duration_s, self._item(one)) for one in result.windows]
        self._live.hold([one.item for one in windows], source.path)
        return DecodedAudio(result.duration_s, windows)

    def _item(self, window: Window) -> MediaItem:
        tensors = {FEATURES: MediaTensor("float32", window.shape, LiveBuffer(window.data))}
        return MediaItem([], window.digest, tensors, attended_rows=self._attended_rows, kind="audio")

    def clear_cache(self) -> None:
        """Do nothing: results are not cached."""

    async def close(self) -> None:
        """Stop the processes that decode audio."""
        await self._processes.close()
