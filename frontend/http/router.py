"""`create_router`: the routes of the API, for FastAPI applications."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from octavo.frontend.calls.services import require_no_services
from octavo.frontend.client import AsyncClient
from octavo.frontend.http import openapi
from octavo.frontend.http.auth import ADMIN_PATH
from octavo.frontend.http.configure import make_app_state, require_no_batches
from octavo.frontend.http.errors import ErrorBody, MessagesErrorBody, is_messages_path
from octavo.frontend.http.route import ApiRoute, answer_failures
from octavo.frontend.http.routes import admin, audio, batches, dev, pooling, responses
from octavo.frontend.http.routes.chat import create_chat_completion, create_chat_completion_batch
from octavo.frontend.http.routes.completions import create_completion
from octavo.frontend.http.routes.engine import load, reset_prefix_cache, server_info, start_profile, stop_profile
from octavo.frontend.http.routes.generate import generate_tokens
from octavo.frontend.http.routes.health import health, metrics, version
from octavo.frontend.http.routes.lora import load_lora_adapter, unload_lora_adapter
from octavo.frontend.http.routes.messages import count_message_tokens, create_message
from octavo.frontend.http.routes.models import list_models, retrieve_model
from octavo.frontend.http.routes.tokenize import detokenize, tokenize, tokenizer_info
from octavo.frontend.http.schemas.admin import AddEngine, DrainEngine, EngineList, ReplaceEngines, ResumeEngine
from octavo.frontend.http.schemas.audio import FORM_FIELDS, Transcription
from octavo.frontend.http.schemas.batches import (
    FILE_FIELDS,
    Batch,
    BatchList,
    BatchRequestBody,
    DeletedFile,
    FileList,
    FileObject,
)
from octavo.frontend.http.schemas.chat import ChatBatchRequest, ChatCompletion, ChatCompletionRequest
from octavo.frontend.http.schemas.cohere import CohereEmbedRequest, CohereEmbedResponse
from octavo.frontend.http.schemas.completions import CompletionRequest, CompletionResponse
from octavo.frontend.http.schemas.dev import (
    Changed,
    IsPaused,
    IsSleeping,
    UpdatedWeights,
    UpdateWeightsRequest,
    WeightsList,
)
from octavo.frontend.http.schemas.engine import Done, Load, ServerInfo, Version
from octavo.frontend.http.schemas.generate import GenerateRequest, GenerateResponse
from octavo.frontend.http.schemas.lora import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from octavo.frontend.http.schemas.messages import CountTokensRequest, MessageAnswer, MessagesRequest, TokenCount
from octavo.frontend.http.schemas.models import ModelCard, ModelList
from octavo.frontend.http.schemas.pooling import (
    ClassificationRequest,
    ClassificationResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingRequest,
    PoolingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
)
from octavo.frontend.http.schemas.responses import DeletedResponse, InputItems, ResponseObject, ResponsesRequest
from octavo.frontend.http.schemas.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from octavo.frontend.lora.startup import allows_updates, require_no_modules
from octavo.protocol.config import ServerConfig


def create_router(client: AsyncClient, config: ServerConfig | None = None) -> APIRouter:
    """Return the routes for one engine, to be included in a FastAPI application.

    The router has its own body limits and error bodies. API keys, CORS and pages belong to `create_app`: an application
    that includes the router does its own authentication.

    Args:
        client: the engine's client; its owner closes it. It gets an observer that counts for `/metrics`, unless it has
        one.
        config: the server's configuration, of which only settings about requests apply. None: the defaults.

    Raises:
        ConfigError: the configuration has `lora_modules`, tenants, traces or an access log, or names a parser, a
            template or a directory that cannot be used.
    """
    config = config or ServerConfig()
    require_no_modules(config)
    require_no_batches(config)
    require_no_services(config)
    state = make_app_state(client, config)
    router = APIRouter(route_class=ApiRoute.bound_to(state, config.max_request_body_bytes))
    add_routes(router, config)
    return router


def add_routes(router: APIRouter, config: ServerConfig) -> None:
    """Add the API's routes to a router whose route class is an `ApiRoute`."""
    add = _Adder(router)
    add.post("/v1/chat/completions", create_chat_completion, ChatCompletionRequest, ChatCompletion, streams=True)
    add.post("/v1/chat/completions/batch", create_chat_completion_batch, ChatBatchRequest, ChatCompletion)
    add.post("/v1/completions", create_completion, CompletionRequest, CompletionResponse, streams=True)
    add.post("/inference/v1/generate", generate_tokens, GenerateRequest, GenerateResponse, streams=True)
    add.post("/v1/messages", create_message, MessagesRequest, MessageAnswer, streams=True)
    add.post("/v1/messages/count_tokens", count_message_tokens, CountTokensRequest, TokenCount)
    _add_responses(add)
    _add_batches(add)
    for path, endpoint in (
        ("/v1/audio/transcriptions", audio.create_transcription),
        ("/v1/audio/translations", audio.create_translation),
    ):
        add.upload(path, endpoint, FORM_FIELDS, Transcription, streams=True, failures=(400, 404, 413, 415))
    add.post("/v1/embeddings", pooling.create_embeddings, EmbeddingRequest, EmbeddingResponse)
    for path in ("/v1/embed", "/v2/embed"):
        add.post(path, pooling.create_cohere_embeddings, CohereEmbedRequest, CohereEmbedResponse)
    add.post("/pooling", pooling.create_pooling, PoolingRequest, PoolingResponse)
    add.post("/classify", pooling.classify, ClassificationRequest, ClassificationResponse)
    for path in ("/score", "/v1/score"):
        add.post(path, pooling.create_scores, ScoreRequest, ScoreResponse)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        add.post(path, pooling.rerank, RerankRequest, RerankResponse)
    add.get("/v1/models", list_models, ModelList)
    add.get("/v1/models/{model_id:path}", retrieve_model, ModelCard, failures=(404,), parameter="model_id")
    add.post("/tokenize", tokenize, TokenizeRequest, TokenizeResponse)
    add.post("/detokenize", detokenize, DetokenizeRequest, DetokenizeResponse)
    add.get("/health", health, failures=(503,))
    add.get("/ping", health, failures=(503,))
    add.post("/ping", health, failures=(503,))
    add.get("/version", version, Version)
    add.get("/metrics", metrics, media_type="text/plain")
    add.get("/load", load, Load)
    add.get("/server_info", server_info, ServerInfo)
    add.post("/reset_prefix_cache", reset_prefix_cache, response=Done, failures=(409,))
    add.post("/start_profile", start_profile, response=Done, failures=(400,))
    add.post("/stop_profile", stop_profile, response=Done, failures=(400,))
    if allows_updates(config):
        add.post("/v1/load_lora_adapter", load_lora_adapter, LoadLoRAAdapterRequest, failures=(400,))
        add.post("/v1/unload_lora_adapter", unload_lora_adapter, UnloadLoRAAdapterRequest, failures=(400, 404))
    if config.enable_tokenizer_info_endpoint:
        add.get("/tokenizer_info", tokenizer_info, TokenizerInfo)


def _add_responses(add: "_Adder") -> None:
    path, name = "/v1/responses/{response_id}", "response_id"
    add.post("/v1/responses", responses.create_response, ResponsesRequest, ResponseObject, streams=True)
    add.get(path, responses.retrieve_response, ResponseObject, failures=(400, 404), parameter=name)
    add.delete(path, responses.delete_response, DeletedResponse, failures=(404,), parameter=name)
    add.post(f"{path}/cancel", responses.cancel_response, response=ResponseObject, failures=(400, 404), parameter=name)
    add.get(f"{path}/input_items", responses.list_input_items, InputItems, failures=(400, 404), parameter=name)


def _add_batches(add: "_Adder") -> None:
    file, batch = "/v1/files/{file_id}", "/v1/batches/{batch_id}"
    add.upload(
        "/v1/files", batches.upload_file, FILE_FIELDS, FileObject, failures=(400, 404, 409, 413), required=["purpose"]
    )
    add.get("/v1/files", batches.list_files, FileList, failures=(400, 404))
    add.get(file, batches.retrieve_file, FileObject, failures=(404,), parameter="file_id")
    add.delete(file, batches.delete_file, DeletedFile, failures=(404, 409), parameter="file_id")
    media_type = "application/octet-stream"
    add.get(f"{file}/content", batches.read_file, media_type=media_type, failures=(404,), parameter="file_id")
    add.post("/v1/batches", batches.create_batch, BatchRequestBody, Batch, failures=(409,))
    add.get("/v1/batches", batches.list_batches, BatchList, failures=(400, 404))
    add.get(batch, batches.retrieve_batch, Batch, failures=(404,), parameter="batch_id")
    failures = (404, 409)
    add.post(f"{batch}/cancel", batches.cancel_batch, response=Batch, failures=failures, parameter="batch_id")


def add_dev_routes(router: APIRouter) -> None:
    """Add the routes that change weights while the server serves."""
    add = _Adder(router)
    add.post("/sleep", dev.sleep, response=Changed, failures=(400, 409))
    add.post("/wake_up", dev.wake_up, response=Changed, failures=(400, 409))
    add.get("/is_sleeping", dev.is_sleeping, IsSleeping)
    add.post("/pause", dev.pause, response=Changed, failures=(400,))
    add.post("/resume", dev.resume, response=Changed, failures=(409,))
    add.get("/is_paused", dev.is_paused, IsPaused)
    add.post("/update_weights", dev.update_weights, UpdateWeightsRequest, UpdatedWeights, failures=(409,))
    add.get("/weights", dev.weights, WeightsList)


def add_admin_routes(router: APIRouter) -> None:
    """Add the routes for operators, which require an admin key."""
    add = _Adder(router)
    add.get(ADMIN_PATH, admin.list_engines, EngineList)
    add.post(f"{ADMIN_PATH}/add", admin.add_engine, AddEngine, EngineList, failures=(409,))
    add.post(f"{ADMIN_PATH}/drain", admin.drain_engine, DrainEngine, EngineList, failures=(409,))
    add.post(f"{ADMIN_PATH}/resume", admin.resume_engine, ResumeEngine, EngineList, failures=(409,))
    add.post(f"{ADMIN_PATH}/remove", admin.remove_engine, DrainEngine, EngineList, failures=(409,))
    add.post(f"{ADMIN_PATH}/replace", admin.replace_engines, ReplaceEngines, EngineList, failures=(409,))


class _Adder:
    """Adds routes together with their OpenAPI descriptions."""

    def __init__(self, router: APIRouter) -> None:
        self._router = router

    def get(
        self,
        path: str,
        endpoint: Callable[..., Any],
        response: openapi.Schema | None = None,
        *,
        failures: tuple[int, ...] = (),
        media_type: str | None = None,
        parameter: str | None = None,
    ) -> None:
        extra = {} if parameter is None else openapi.path_parameter(parameter)
        self._add("GET", path, endpoint, openapi.responses(response, media_type=media_type, failures=failures), extra)

    def upload(
        self,
        path: str,
        endpoint: Callable[..., Any],
        fields: Mapping[str, Any],
        response: openapi.Schema,
        *,
        streams: bool = False,
        failures: tuple[int, ...],
        required: Sequence[str] = (),
    ) -> None:
        form = openapi.form_body(fields, required)
        self._add("POST", path, endpoint, openapi.responses(response, streams=streams, failures=failures), form)

    def delete(
        self,
        path: str,
        endpoint: Callable[..., Any],
        response: openapi.Schema,
        *,
        failures: tuple[int, ...],
        parameter: str,
    ) -> None:
        described = openapi.responses(response, failures=failures)
        self._add("DELETE", path, endpoint, described, openapi.path_parameter(parameter))

    def post(
        self,
        path: str,
        endpoint: Callable[..., Any],
        request: openapi.Schema | None = None,
        response: openapi.Schema | None = None,
        *,
        streams: bool = False,
        failures: tuple[int, ...] = (),
        parameter: str | None = None,
    ) -> None:
        extra = {} if request is None else openapi.request_body(request)
        if parameter is not None:
            extra |= openapi.path_parameter(parameter)
        error = MessagesErrorBody if is_messages_path(path) else ErrorBody
        described = openapi.responses(
            response, streams=streams, failures=failures, has_request_body=bool(request), error=error
        )
        self._add("POST", path, endpoint, described, extra)

    def _add(
        self,
        method: str,
        path: str,
        endpoint: Callable[..., Any],
        responses: dict[int | str, openapi.Document],
        extra: openapi.Document,
    ) -> None:
        self._router.add_api_route(
            path,
            answer_failures(endpoint),
            methods=[method],
            operation_id=f"{method} {path}",
            summary=(endpoint.__doc__ or "").partition("\n")[0],
            description=" ",
            response_class=Response,
            response_model=None,
            responses=responses,
            openapi_extra=extra,
        )
