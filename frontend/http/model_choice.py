"""`choose_state`: finds the model of a request, on a server that has joined engines of several models."""

import msgspec
from starlette.datastructures import QueryParams
from starlette.types import Scope

from octavo.frontend.http.app_state import AppState
from octavo.protocol.errors import InvalidRequestError

OF_SERVER = frozenset(
    {
        "/",
        "/dashboard/{name}",
        "/health",
        "/load",
        "/metrics",
        "/ping",
        "/v1/batches",
        "/v1/batches/{batch_id}",
        "/v1/batches/{batch_id}/cancel",
        "/v1/files",
        "/v1/files/{file_id}",
        "/v1/files/{file_id}/content",
        "/v1/models",
        "/v1/models/{model_id:path}",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/responses/{response_id}/input_items",
        "/version",
    }
)
"""Routes that serve all models together."""

BY_BODY = frozenset(
    {
        "/classify",
        "/detokenize",
        "/inference/v1/generate",
        "/pooling",
        "/rerank",
        "/score",
        "/tokenize",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/completions",
        "/v1/embed",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/responses",
        "/v1/score",
        "/v2/embed",
        "/v2/rerank",
    }
)
"""Routes whose body names the model; without a name the first model is used. All other routes need `?model=NAME`."""

BY_FORM = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
"""Routes whose form names the model: their handlers read the form and choose the model."""


class _Body(msgspec.Struct):
    model: str | None = None


async def choose_state(state: AppState, path: str, scope: Scope, body: bytes) -> AppState:
    """Return the state of the model that a request names.

    Args:
        state: the state of the application.
        path: the path of the route, with the names of its parameters.
        scope: the ASGI scope of the request.
        body: the request body.

    Raises:
        InvalidRequestError: the route is for one model, and the request names none.
        ModelNotFoundError: no engine serves the model.
    """
    if not state.others or path in OF_SERVER or path in BY_FORM:
        return state
    if path in BY_BODY:
        name = _model_of(body)
        return state if name is None else await state.of_model(name)
    names = QueryParams(scope.get("query_string", b"")).getlist("model")
    if len(names) != 1:
        served = ", ".join(one.client.facts.served_model_names[0] for one in state.of_all_models)
        raise InvalidRequestError(
            f"this server has engines of several models: choose one of them with {path}?model=NAME ({served})", "model"
        )
    return await state.of_model(names[0])


def _model_of(body: bytes) -> str | None:
    """Return the model that a body names. Also `None` if the body is invalid: the route will reject it."""
    try:
        return _DECODER.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


_DECODER = msgspec.json.Decoder(_Body)
