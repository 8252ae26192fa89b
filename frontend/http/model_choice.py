"""`choose_state`: which model a request is for, on a server that has joined engines of several."""

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
"""Routes that answer for all models."""

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
"""Routes whose body names the model; without a name it is the first one. All further routes need it in the query."""

BY_FORM = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
"""Routes whose form names the model: they read it, and choose."""


class _Body(msgspec.Struct):
    model: str | None = None


async def choose_state(state: AppState, path: str, scope: Scope, body: bytes) -> AppState:
    """Return the state of the model that a request names.

    Args:
        state: of the application.
        path: of the route, with the names of its parameters.
        scope: of the request.
        body: of the request.

    Raises:
        InvalidRequestError: the route is about one model, and the request names none.
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
    """Return the model that a body names. None too if it is invalid: then the route rejects it."""
    try:
        return _DECODER.decode(body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


_DECODER = msgspec.json.Decoder(_Body)
