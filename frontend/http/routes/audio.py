"""`POST /v1/audio/transcriptions` and `POST /v1/audio/translations`."""

from starlette.responses import Response

from octavo.frontend.audio.open import open_transcriber
from octavo.frontend.http.app_state import AppState
from octavo.frontend.http.audio_form import read_audio_form
from octavo.frontend.http.dependencies import CurrentState
from octavo.frontend.http.render.logprobs import TokenNames
from octavo.frontend.http.render.transcription import transcription_events, whole_transcription
from octavo.frontend.http.request import ApiRequest
from octavo.frontend.http.sse import EventStream
from octavo.protocol.errors import InvalidRequestError


async def create_transcription(state: CurrentState, http_request: ApiRequest) -> Response:
    """Transcribe the speech in a file."""
    return await _answer(state, http_request, "transcribe")


async def create_translation(state: CurrentState, http_request: ApiRequest) -> Response:
    """Transcribe the speech in a file, and translate it to English."""
    return await _answer(state, http_request, "translate")


async def _answer(state: AppState, http_request: ApiRequest, task: str) -> Response:
    form = await read_audio_form(http_request, task)
    if state.others and form.model is not None:
        state = await state.of_model(form.model)
    model, adapter = await state.choose_model(form.model)
    if adapter is not None:
        raise InvalidRequestError("model: transcriptions take no LoRA adapters: name the model itself", "model")
    transcriber = open_transcriber(state.client)
    clip = await transcriber.read(form.request, f"audio-{http_request.choose_id(None)}")
    names = TokenNames(state.client.tokenizer)
    if form.streams:
        events = transcription_events(transcriber, clip, form, names, model)
        return EventStream(events, state.keep_alive_s)
    return await whole_transcription(transcriber, clip, form, names)
