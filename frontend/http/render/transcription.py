"""Renders transcriptions as unary responses and as streams of events."""

import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response

from octavo.frontend.audio.open import AnyTranscriber, TranscribedClip
from octavo.frontend.audio.subtitles import subrip, webvtt
from octavo.frontend.audio.text import JoinedText
from octavo.frontend.http.audio_form import WITH_TIMESTAMPS, AudioForm
from octavo.frontend.http.render.logprobs import LOWEST, TokenNames
from octavo.frontend.http.request import JSON
from octavo.frontend.http.schemas.audio import (
    ChunkChoice,
    ChunkDelta,
    DurationUsage,
    TokenUsage,
    TranscriptEvent,
    Transcription,
    TranscriptionLogprob,
    TranscriptionSegment,
    TranscriptionWord,
    VerboseTranscription,
)
from octavo.frontend.http.sse import events
from octavo.frontend.outputs import RequestOutput
from octavo.protocol.params import OutputKind

_CHUNKS = {"transcribe": "transcription.chunk", "translate": "translation.chunk"}


async def whole_transcription(
    transcriber: AnyTranscriber, clip: TranscribedClip, form: AudioForm, names: TokenNames
) -> Response:
    """Return the response in the requested format.

    Raises:
        OctavoError: the transcription failed.
    """
    joined, text, outputs = JoinedText(), "", []
    async with aclosing(transcriber.outputs(clip, OutputKind.FINAL_ONLY)) as found:
        async for index, output in found:
            text += joined.add(index, output.outputs[0].text)
            outputs.append(output)
    if form.format == "text":
        return Response(text + "\n", media_type="text/plain")
    usage = DurationUsage(seconds=math.ceil(clip.duration_s))
    if form.format in WITH_TIMESTAMPS:
        return _with_segments(transcriber, clip, form, outputs, usage)
    logprobs = [one for output in outputs for one in _logprobs(output, names)] if form.has_logprobs else None
    return _json(Transcription(text=text, logprobs=logprobs, usage=usage))


def _with_segments(
    transcriber: AnyTranscriber,
    clip: TranscribedClip,
    form: AudioForm,
    outputs: Sequence[RequestOutput],
    usage: DurationUsage,
) -> Response:
    segments = transcriber.segments(clip, outputs)
    if form.format == "srt":
        return Response(subrip(segments), media_type="application/x-subrip")
    if form.format == "vtt":
        return Response(webvtt(segments), media_type="text/vtt")
    joined = JoinedText()
    shown = [
        TranscriptionSegment(
            id=number,
            seek=one.seek,
            start=one.start_s,
            end=one.end_s,
            text=one.text,
            tokens=one.token_ids,
            temperature=clip.params.temperature,
            avg_logprob=max(LOWEST, one.avg_logprob),
            compression_ratio=one.compression_ratio,
            no_speech_prob=one.no_speech_prob,
        )
        for number, one in enumerate(segments)
    ]
    return _json(
        VerboseTranscription(
            task="translate" if form.request.task == "translate" else "transcribe",
            language=clip.language,
            duration=clip.duration_s,
            text="".join(joined.add(one.seek, one.text) for one in shown),
            segments=shown if form.has_segments else None,
            words=_words(transcriber, clip, outputs) if form.has_words else None,
            usage=usage,
        )
    )


def _words(
    transcriber: AnyTranscriber, clip: TranscribedClip, outputs: Sequence[RequestOutput]
) -> list[TranscriptionWord]:
    return [
        TranscriptionWord(word=one.text, start=one.start_s, end=one.end_s) for one in transcriber.words(clip, outputs)
    ]


# long: one stream from its first event to its last
async def transcription_events(
    transcriber: AnyTranscriber, clip: TranscribedClip, form: AudioForm, names: TokenNames, model: str
) -> AsyncGenerator[bytes]:
    """Yield the events of a stream: new text as it arrives, and the complete text at the end.

    Raises:
        OctavoError: the transcription failed.
    """
    joined, pieces, all_logprobs = JoinedText(), [], []
    num_input, num_output, finish_reason = 0, 0, "stop"
    created, kind = int(time.time()), _CHUNKS[form.request.task]

    def event(name: str, choice: ChunkChoice, **fields: Any) -> bytes:
        of_stream: dict[str, Any] = {"id": clip.request_id, "object": kind, "created": created, "model": model}
        body = TranscriptEvent(type=f"transcript.text.{name}", choices=[choice], **of_stream, **fields)
        return events([msgspec.json.encode(body)])

    async with aclosing(transcriber.outputs(clip, OutputKind.DELTA)) as found:
        async for index, output in found:
            one = output.outputs[0]
            num_output += len(one.token_ids)
            logprobs = _logprobs(output, names) if form.has_logprobs else None
            all_logprobs += logprobs or []
            if one.finish_reason is not None:
                num_input += len(output.prompt_token_ids)
                finish_reason = "length" if one.finish_reason == "length" else finish_reason
            if (piece := joined.add(index, one.text)) or logprobs:
                pieces.append(piece)
                choice = ChunkChoice(delta=ChunkDelta(content=piece))
                yield event("delta", choice, delta=piece, logprobs=logprobs)
    usage = TokenUsage(input_tokens=num_input, output_tokens=num_output, total_tokens=num_input + num_output)
    choice = ChunkChoice(delta=ChunkDelta(content=""), finish_reason=finish_reason)
    logprobs = all_logprobs if form.has_logprobs else None
    yield event("done", choice, text="".join(pieces), logprobs=logprobs, usage=usage)


def _logprobs(output: RequestOutput, names: TokenNames) -> list[TranscriptionLogprob]:
    one = output.outputs[0]
    return [
        TranscriptionLogprob(
            token=names.name(token), bytes=names.data(token), logprob=max(LOWEST, found[token].logprob)
        )
        for token, found in zip(one.token_ids, one.logprobs or [], strict=True)
    ]


def _json(body: Transcription | VerboseTranscription) -> Response:
    return Response(msgspec.json.encode(body), media_type=JSON)
