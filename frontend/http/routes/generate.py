"""`POST /inference/v1/generate`: vLLM's route that takes token ids and returns token ids."""

import msgspec
from starlette.responses import Response

from octavo.frontend.http.app_state import answer_style, receipt_recorder
from octavo.frontend.http.body import decode
from octavo.frontend.http.chat_request import errors_renamed
from octavo.frontend.http.dependencies import CurrentState
from octavo.frontend.http.generate_request import ERROR_NAMES, completion_body
from octavo.frontend.http.generation_request import check_fields
from octavo.frontend.http.render.generate import TokensAnswer
from octavo.frontend.http.request import ApiRequest
from octavo.frontend.http.routes.completions import prepare_completion
from octavo.frontend.http.schemas.generate import GenerateRequest
from octavo.frontend.http.sse import EventStream
from octavo.frontend.http.stream import stream_pieces
from octavo.frontend.http.whole import WholeAnswer
from octavo.frontend.pooling.spec import require_generation

COMPLETIONS_PATH = "/v1/completions"
"""Receipts record the equivalent request to this route."""


async def generate_tokens(state: CurrentState, http_request: ApiRequest) -> Response:
    """Continue a prompt of token ids; return token ids."""
    request = decode(http_request.take_body(), GenerateRequest)
    model, adapter = await state.choose_model(request.model)
    require_generation(state.client.config)
    body, others = completion_body(request, state.client.facts.max_model_len)
    request_id = http_request.choose_id(request.request_id)
    with errors_renamed(ERROR_NAMES):
        check_fields(body)
        (generation,) = await prepare_completion(state, body, adapter, **others)
    recorder = receipt_recorder(state, http_request, msgspec.json.encode(body), path=COMPLETIONS_PATH)
    body.return_tokens_as_token_ids = True
    answer = TokensAnswer(answer_style(state, body, request_id, model, body.logprobs, recorder=recorder))
    prepared = {f"generate-{request_id}": generation}
    if body.stream:
        pieces = stream_pieces(state, prepared, answer, ERROR_NAMES, recorder)
        return EventStream(pieces, state.keep_alive_s)
    return WholeAnswer(state, prepared, answer.whole, ERROR_NAMES, recorder)
