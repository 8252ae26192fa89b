"""The form of `/v1/audio/transcriptions` and `/v1/audio/translations`: its checked fields, and its file."""

from importlib.util import find_spec
from typing import Any

from starlette.datastructures import FormData

from octavo.frontend.audio.transcriber import SpeechRequest
from octavo.frontend.http.form import form_with_file
from octavo.frontend.http.request import ApiRequest
from octavo.frontend.http.schemas.audio import FORM_FIELDS
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.params import SamplingParams

WITH_TIMESTAMPS = ("verbose_json", "srt", "vtt")
"""Response formats that contain the times of segments."""

_NUMBERS = {"number": float, "integer": int}
_SWITCHES = {"true": True, "1": True, "false": False, "0": False}
_OF_PARAMS = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)


class AudioForm:
    """The form that a client has sent.

    Args:
        file: the audio file.
        fields: the other fields that are not empty, each converted to its type.
        task: "transcribe" or "translate".

    Raises:
        InvalidRequestError: a value is out of range, or contradicts another one.
    """

    def __init__(self, file: bytes, fields: dict[str, Any], task: str) -> None:
        self.model: str | None = fields.get("model")
        self.format: str = fields.get("response_format", "json")
        self.streams: bool = fields.get("stream", False)
        self.has_logprobs = bool(fields.get("include[]"))
        has_timestamps = self.format in WITH_TIMESTAMPS
        granularities = fields.get("timestamp_granularities[]", [])
        self.has_words, self.has_segments = "word" in granularities, set(granularities) != {"word"}
        if granularities and self.format != "verbose_json":
            raise _contradiction("timestamp_granularities[]", "response_format verbose_json")
        if self.has_logprobs and self.format != "json":
            raise _contradiction("include[]", "response_format json")
        if self.streams and has_timestamps:
            raise InvalidRequestError(f"stream: {self.format} is not streamed; use json or text", "stream")
        params = {name: fields[name] for name in _OF_PARAMS if name in fields}
        self.request = SpeechRequest(
            file=file,
            params=SamplingParams(
                **{"temperature": 0.0, **params},
                max_tokens=fields.get("max_completion_tokens"),
                logprobs=0 if self.has_logprobs else None,
            ),
            task=task,
            language=fields.get("language"),
            prompt=fields.get("prompt", ""),
            has_timestamps=has_timestamps,
            has_segment_logprobs=self.format == "verbose_json",
            has_words=self.has_words,
        )


async def read_audio_form(http_request: ApiRequest, task: str) -> AudioForm:
    """Read a form.

    Raises:
        InvalidRequestError: the form is invalid; `param` names the field.
    """
    if find_spec("python_multipart") is None:
        raise InvalidRequestError("file: this server needs pip install 'octavo[audio]'", "file")
    async with form_with_file(http_request, max_fields=32) as (form, file):
        return AudioForm(await file.read(), _fields(form), task)


def _fields(form: FormData) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, text in form.multi_items():
        if name == "file":
            continue
        is_list = name.endswith("[]")
        if name not in FORM_FIELDS or (name in fields and not is_list) or not isinstance(text, str):
            why = "is given twice" if name in fields else "is not supported here"
            raise InvalidRequestError(f"{name} {why}: leave it out", name)
        if text and is_list:
            fields.setdefault(name, []).append(_value(name, text, FORM_FIELDS[name]["items"]))
        elif text:
            fields[name] = _value(name, text, FORM_FIELDS[name])
    return fields


def _value(name: str, text: str, schema: dict[str, Any]) -> Any:
    """Return the value of a field, converted to its type.

    Raises:
        InvalidRequestError: the text is not of the field's type, or the value is not supported.
    """
    if "enum" in schema and text not in schema["enum"]:
        raise InvalidRequestError(f"{name} is {text!r}; expected {' or '.join(schema['enum'])}", name)
    if schema["type"] == "string":
        return text
    try:
        return _SWITCHES[text.lower()] if schema["type"] == "boolean" else _NUMBERS[schema["type"]](text)
    except (KeyError, ValueError):
        raise InvalidRequestError(f"{name} is {text!r}; expected a JSON {schema['type']}", name) from None


def _contradiction(name: str, needed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} needs {needed}: send both, or leave it out", name)
