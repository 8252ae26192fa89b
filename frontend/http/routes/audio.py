"""`POST /v1/audio/transcriptions` and `POST /v1/audio/translations`."""

import math
from typing import Any

import msgspec
from starlette.datastructures import FormData
from starlette.responses import Response

from octavo.frontend.audio.transcriber import Transcriber
from octavo.frontend.http.app_state import AppState
from octavo.frontend.http.dependencies import CurrentState
from octavo.frontend.http.form import form_with_file
from octavo.frontend.http.request import JSON, ApiRequest
from octavo.frontend.http.schemas.audio import FORM_FIELDS, DurationUsage, Transcription
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.params import SamplingParams

_NUMBERS = {"number": float, "integer": int}
_NOT_OF_PARAMS = {"model", "language", "prompt", "response_format", "stream", "max_completion_tokens"}


async def create_transcription(state: CurrentState, http_request: ApiRequest) -> Response:
    """Write down what is spoken in a file."""
    return await _answer(state, http_request, "transcribe")


async def create_translation(state: CurrentState, http_request: ApiRequest) -> Response:
    """Write down in English what is spoken in a file."""
    return await _answer(state, http_request, "translate")


async def _answer(state: AppState, http_request: ApiRequest, task: str) -> Response:
    file, fields = await _read(http_request)
    if state.others and "model" in fields:
        state = await state.of_model(fields["model"])
    _, adapter = await state.choose_model(fields.get("model"))
    if adapter is not None:
        raise InvalidRequestError("model: transcriptions take no LoRA adapters: name the model itself", "model")
    transcriber = Transcriber(state.client, task)
    transcript = await transcriber.transcribe(
        file,
        _params(fields),
        language=fields.get("language"),
        prompt=fields.get("prompt", ""),
        request_id=f"audio-{http_request.choose_id(None)}",
    )
    if fields.get("response_format") == "text":
        return Response(transcript.text + "\n", media_type="text/plain")
    usage = DurationUsage(seconds=math.ceil(transcript.duration_s))
    return Response(msgspec.json.encode(Transcription(text=transcript.text, usage=usage)), media_type=JSON)


async def _read(http_request: ApiRequest) -> tuple[bytes, dict[str, Any]]:
    """Return the file and the other fields, which are not empty.

    Raises:
        InvalidRequestError: the form is invalid.
    """
    try:
        import python_multipart  # noqa: F401
    except ImportError:
        raise InvalidRequestError("file: this server needs pip install 'octavo[audio]'", "file") from None
    async with form_with_file(http_request, max_fields=32) as (form, file):
        return await file.read(), _fields(form)


def _fields(form: FormData) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, text in form.multi_items():
        if name == "file":
            continue
        if name not in FORM_FIELDS or name in fields or not isinstance(text, str):
            why = "is given twice" if name in fields else "is not supported here"
            raise InvalidRequestError(f"{name} {why}: leave it out", name)
        if text:
            fields[name] = _value(name, text)
    return fields


def _value(name: str, text: str) -> Any:
    """Return the value of a field.

    Raises:
        InvalidRequestError: it has none of its type, or one that is not supported.
    """
    schema = FORM_FIELDS[name]
    if schema["type"] == "boolean":
        if text.lower() not in ("false", "0"):
            raise InvalidRequestError(f"{name} is {text!r}; only false is supported for audio", name)
        return False
    if "enum" in schema and text not in schema["enum"]:
        raise InvalidRequestError(f"{name} is {text!r}; expected {' or '.join(schema['enum'])}", name)
    if (number := _NUMBERS.get(schema["type"])) is None:
        return text
    try:
        return number(text)
    except ValueError:
        raise InvalidRequestError(f"{name} is {text!r}; expected a JSON {schema['type']}", name) from None


def _params(fields: dict[str, Any]) -> SamplingParams:
    """Return the parameters of sampling, checked: greedy unless the request says otherwise."""
    given = {name: value for name, value in fields.items() if name not in _NOT_OF_PARAMS}
    max_tokens = fields.get("max_completion_tokens")
    params = SamplingParams(**{"temperature": 0.0, **given}, max_tokens=max_tokens)
    params.verify()
    return params
