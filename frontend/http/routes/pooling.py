"""The routes of pooling models: `/v1/embeddings`, `/pooling`, `/classify`, `/score` and `/rerank`."""

from collections.abc import Callable

from starlette.responses import Response

from octavo.frontend.http.app_state import AppState
from octavo.frontend.http.body import decode
from octavo.frontend.http.dependencies import CurrentState
from octavo.frontend.http.pooling_input import (
    choose_pooling_model,
    compared_inputs,
    inputs_of,
    pooling_params,
    prompts_of,
)
from octavo.frontend.http.render.pooling import (
    render_classes,
    render_cohere_embeddings,
    render_embeddings,
    render_pooling,
    render_ranking,
    render_scores,
)
from octavo.frontend.http.request import JSON, ApiRequest
from octavo.frontend.http.schemas.cohere import CohereEmbedRequest
from octavo.frontend.http.schemas.pooling import (
    ClassificationRequest,
    EmbeddingRequest,
    InputFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    ScoringFields,
)
from octavo.frontend.pooling.inputs import Fields
from octavo.frontend.pooling.outputs import ScoringRequestOutput
from octavo.frontend.pooling.result import PooledResult
from octavo.frontend.pooling.score_inputs import ScoreInput
from octavo.frontend.pooling.scoring import score
from octavo.protocol.adapters import Adapter
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.pooling import PoolingTask
from octavo.protocol.pooling_params import PoolingParams

MANY_BYTES = 2**18
"""Size in bytes above which results are rendered in a thread, because that takes a millisecond or more."""


async def create_embeddings(state: CurrentState, http_request: ApiRequest) -> Response:
    """Compute a vector for each text."""
    body = decode(http_request.take_body(), EmbeddingRequest)
    model, adapter = await choose_pooling_model(state, body.model)
    answer_id = f"embd-{http_request.choose_id(body.request_id)}"
    params = pooling_params(body, dimensions=body.dimensions)
    prefix = _named_prompt(state, body.prompt_name)
    results = await _run(state, body, params, "embed", answer_id, adapter, prefix)
    return await _answer(state, results, lambda: render_embeddings(body, results, answer_id, state.now(), model))


async def create_cohere_embeddings(state: CurrentState, http_request: ApiRequest) -> Response:
    """Compute a vector for each text, for Cohere's clients. Older ones use the first version of the API."""
    body = decode(http_request.take_body(), CohereEmbedRequest)
    _, adapter = await choose_pooling_model(state, body.model)
    answer_id = http_request.choose_id(None)
    cut = None if body.truncate == "NONE" else body.max_tokens or -1
    inner = EmbeddingRequest(
        input=[*body.texts],
        priority=body.priority,
        truncate_prompt_tokens=cut,
        truncation_side="left" if body.truncate == "START" else "right",
    )
    facts, name = state.client.config.model.pooling, (body.input_type or "").removeprefix("search_")
    prefix = facts.prompts.get(name, "") if facts else ""
    params = pooling_params(inner, dimensions=body.output_dimension)
    named = Fields("texts", limits=("max_tokens", "max_tokens"))
    results = await _run(state, inner, params, "embed", answer_id, adapter, prefix, named)
    version = "1" if http_request.url.path.endswith("/v1/embed") else "2"
    return await _answer(state, results, lambda: render_cohere_embeddings(body, results, answer_id, version))


async def create_pooling(state: CurrentState, http_request: ApiRequest) -> Response:
    """Compute what the pooling model provides: vectors, class scores, or either for each token."""
    body = decode(http_request.take_body(), PoolingRequest)
    model, adapter = await choose_pooling_model(state, body.model)
    answer_id = f"pool-{http_request.choose_id(body.request_id)}"
    params = pooling_params(
        body,
        task=body.task,
        dimensions=body.dimensions,
        step_tag_id=body.step_tag_id,
        returned_token_ids=body.returned_token_ids,
    )
    results = await _run(state, body, params, None, answer_id, adapter)
    return await _answer(state, results, lambda: render_pooling(body, results, answer_id, state.now(), model))


async def classify(state: CurrentState, http_request: ApiRequest) -> Response:
    """Compute the class scores of each text."""
    body = decode(http_request.take_body(), ClassificationRequest)
    model, adapter = await choose_pooling_model(state, body.model)
    answer_id = f"classify-{http_request.choose_id(body.request_id)}"
    results = await _run(state, body, pooling_params(body), "classify", answer_id, adapter)
    labels = _labels(state)
    return await _answer(state, results, lambda: render_classes(labels, results, answer_id, state.now(), model))


async def create_scores(state: CurrentState, http_request: ApiRequest) -> Response:
    """Score pairs of texts."""
    body = decode(http_request.take_body(), ScoreRequest)
    model, adapter = await choose_pooling_model(state, body.model)
    answer_id = f"score-{http_request.choose_id(body.request_id)}"
    names, first, second = compared_inputs(body)
    outputs = await _score(state, body, names, first, second, answer_id, adapter)
    return Response(render_scores(outputs, answer_id, state.now(), model), media_type=JSON)


async def rerank(state: CurrentState, http_request: ApiRequest) -> Response:
    """Sort documents by how well they match a query."""
    body = decode(http_request.take_body(), RerankRequest)
    model, adapter = await choose_pooling_model(state, body.model)
    answer_id = f"rerank-{http_request.choose_id(body.request_id)}"
    documents = inputs_of(body.documents, "documents")
    query = inputs_of(body.query, "query", is_one=True)
    outputs = await _score(state, body, ("query", "documents"), query, documents, answer_id, adapter)
    shown = documents if body.return_documents else None
    return Response(render_ranking(outputs, shown, body.top_n or 0, answer_id, model), media_type=JSON)


async def _run(
    state: AppState,
    body: InputFields,
    params: PoolingParams,
    task: PoolingTask | None,
    request_id: str,
    adapter: Adapter | None,
    prefix: str = "",
    named: Fields | None = None,
) -> list[PooledResult]:
    """Compute the requested results; `named`: field names of the prompts for errors, if not the body's."""
    prompts, fields = await prompts_of(state, body, prefix)
    adds = body.add_special_tokens
    if adds is None:  # chat templates write special tokens themselves
        media = state.client.config.media
        adds = body.messages is None or (media is not None and media.vector_width > 0)
    return await state.client.pooler.run(
        prompts,
        params,
        task=task,
        request_id=request_id,
        priority=body.priority,
        cache_salt=body.cache_salt,
        adapter=adapter,
        fields=named or fields,
        add_special_tokens=adds,
    )


async def _score(
    state: AppState,
    body: ScoringFields,
    names: tuple[str, str],
    first: list[ScoreInput],
    second: list[ScoreInput],
    request_id: str,
    adapter: Adapter | None,
) -> list[ScoringRequestOutput]:
    variables = dict(body.chat_template_kwargs or {})
    if body.instruction is not None:
        variables.setdefault("instruction", body.instruction)
    return await score(
        state.client.pooler,
        first,
        second,
        pooling_params(body),
        names=names,
        max_tokens=(body.max_tokens_per_query or 0, body.max_tokens_per_doc or 0),
        template_variables=variables or None,
        processor_kwargs=body.mm_processor_kwargs,
        request_id=request_id,
        priority=body.priority,
        cache_salt=body.cache_salt,
        adapter=adapter,
    )


async def _answer(state: AppState, results: list[PooledResult], render: Callable[[], bytes]) -> Response:
    is_long = sum([len(one.pooled.data) for one in results]) > MANY_BYTES
    return Response(await state.client.run_in_thread(render) if is_long else render(), media_type=JSON)


def _named_prompt(state: AppState, name: str | None) -> str:
    """Return the text that the model's files have for a purpose; "" if the request names no purpose."""
    facts = state.client.config.model.pooling
    if name is None or facts is None:
        return ""
    if name not in facts.prompts:
        known = ", ".join(facts.prompts) or "none"
        raise InvalidRequestError(f"prompt_name {name!r}: the model has these prompts: {known}", "prompt_name")
    return facts.prompts[name]


def _labels(state: AppState) -> list[str]:
    """Return the names of the classes in order; empty if the model does not name them."""
    labels = state.client.config.model.hf_config.get("id2label") or {}
    try:
        return [str(labels[index]) for index in sorted(labels, key=int)]
    except (TypeError, ValueError):
        return []
