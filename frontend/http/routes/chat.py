"""`POST /v1/chat/completions`."""

from starlette.responses import Response

from octavo.frontend.conversation.prepare import prepare_chat
from octavo.frontend.http.app_state import answer_style, receipt_recorder
from octavo.frontend.http.body import decode
from octavo.frontend.http.chat_request import chat_request, error_names, errors_renamed, num_logprobs
from octavo.frontend.http.dependencies import CurrentState
from octavo.frontend.http.load_report import load_format
from octavo.frontend.http.render.chat import ChatChunks, render_chat
from octavo.frontend.http.request import ApiRequest
from octavo.frontend.http.schemas.chat import ChatCompletionRequest
from octavo.frontend.http.sse import EventStream
from octavo.frontend.http.stream import stream_pieces
from octavo.frontend.http.whole import WholeAnswer
from octavo.frontend.pooling.spec import require_generation


async def create_chat_completion(state: CurrentState, http_request: ApiRequest) -> Response:
    """Answer a conversation."""
    data = http_request.take_body()
    body = decode(data, ChatCompletionRequest)
    names = error_names(body)
    with errors_renamed(names):
        model, adapter = await state.choose_model(body.model)
        require_generation(state.client.config)
        prepared = await prepare_chat(chat_request(body, adapter), state.chat_context)
        answer_id = f"chatcmpl-{http_request.choose_id(body.request_id)}"
        recorder = receipt_recorder(state, http_request, data, is_asked=body.return_receipt)
        style = answer_style(state, body, answer_id, model, num_logprobs(body), prepared.rendering, recorder)
        generations = {answer_id: prepared.generation}
        if body.stream:
            chunks = ChatChunks(style, prepared.generation.params.n)
            return EventStream(stream_pieces(state, generations, chunks, names, recorder), state.keep_alive_s)
        return WholeAnswer(
            state,
            generations,
            lambda outputs: render_chat(outputs[0], style),
            names,
            recorder,
            reports_load=load_format(http_request.scope),
        )
