"""`AppState`: what every route needs: the client, the limits, the log, the metrics."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from octavo.frontend.batch.service import BatchService
from octavo.frontend.calls.services import CallServices
from octavo.frontend.conversation.context import ChatContext
from octavo.frontend.conversation.prepare import AnswerRendering
from octavo.frontend.conversation.settings import ChatSettings
from octavo.frontend.generation.params_resolver import ParamsResolver
from octavo.frontend.http.background import BackgroundTasks
from octavo.frontend.http.background_responses import BackgroundResponses
from octavo.frontend.http.render.answer import AnswerSettings, AnswerStyle
from octavo.frontend.http.render.logprobs import TokenNames
from octavo.frontend.http.request import ApiRequest, header_value, route_path
from octavo.frontend.http.request_log import RequestLog
from octavo.frontend.http.response_store import StoreThread
from octavo.frontend.http.schemas.sampling import SamplingFields, StreamOptions
from octavo.frontend.membership.messages import AdminCommand, AdminResult
from octavo.frontend.metrics.call import CURRENT_CALL
from octavo.frontend.receipts.log import ReceiptLog
from octavo.frontend.receipts.recorder import Recorder
from octavo.protocol.adapters import Adapter
from octavo.protocol.errors import InvalidRequestError, ModelNotFoundError
from octavo.protocol.params import MAX_STOP_STRINGS
from octavo.protocol.sampling_table import MAX_N

if TYPE_CHECKING:
    from octavo.frontend.client import AsyncClient
    from octavo.frontend.metrics.exporter import Metrics


Execute: TypeAlias = Callable[[AdminCommand], Awaitable[AdminResult]]
"""Executes an operator's command."""

MAX_NAMES = 16
"""Maximum number of model names in the error about an unknown one."""

MAX_OTHER_CLIENTS = 16
"""Maximum number of additional clients whose derived state, such as the chat template, is kept."""


@dataclass(frozen=True)
class AppState:
    """One model behind one HTTP application."""

    client: "AsyncClient"
    metrics: "Metrics"
    trusts_request_templates: bool = False
    """Whether a request may bring its own chat template."""
    max_n_sequences: int = MAX_N
    """Maximum number of sequences of one request, over all its prompts."""
    max_stop_strings: int = MAX_STOP_STRINGS
    chat: ChatSettings = field(default_factory=ChatSettings)
    profiler_dir: Path | None = None
    """Directory for profiler traces; `None` if profiling is disabled."""
    forces_usage: bool = False
    """Whether streams report usage even if the request does not ask for it."""
    request_log: RequestLog | None = None
    """Logs requests and responses; `None` if they are not logged."""
    answers: AnswerSettings = field(default_factory=AnswerSettings)
    stall_deadline_s: float = 25.0
    """Seconds that the engine may have work without finishing a step before it counts as stalled."""
    keep_alive_s: float = 30.0
    """Seconds of silence after which a stream sends a comment to keep the connection alive; 0: never."""
    execute: Execute | None = None
    """Executes commands of operators; `None` if this application does not own its engines."""
    receipts: ReceiptLog | None = None
    """Log of receipts, one per response; `None` if there is no such log."""
    background_responses: BackgroundResponses = field(default_factory=BackgroundResponses)
    """Stored responses that later requests may continue, and responses that are generated without a connection."""
    calls: CallServices = field(default_factory=CallServices)
    """Per-request services such as metrics and tracing, shared by the whole application."""
    batches: BatchService | None = None
    """Runs batch files; `None` if there are none."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time in seconds at which serving began; it is the models' creation time."""
    others: "tuple[AppState, ...]" = ()
    """States of the other models, if the server has joined engines of several models. Their own `others` is empty."""
    _of_clients: "dict[AsyncClient, AppState]" = field(default_factory=dict)
    """States for applications that override the dependency `get_client`."""

    @cached_property
    def resolver(self) -> ParamsResolver:
        """Resolves the sampling parameters of requests."""
        return ParamsResolver(self.client, self.max_n_sequences, self.max_stop_strings)

    @cached_property
    def chat_context(self) -> ChatContext:
        """The context of `prepare_chat`."""
        return ChatContext(self.client, self.resolver, self.chat, self.trusts_request_templates)

    @property
    def responses(self) -> StoreThread:
        """Stored responses that later requests may continue."""
        return self.background_responses.store

    @property
    def background(self) -> BackgroundTasks:
        """Work that outlives its request; the server waits for it."""
        return self.background_responses.tasks

    def with_client(self, client: "AsyncClient") -> "AppState":
        """Return the state for another engine's client; the metrics are shared."""
        if client is self.client:
            return self
        found = self._of_clients.get(client)
        if found is None:
            if len(self._of_clients) >= MAX_OTHER_CLIENTS:
                del self._of_clients[next(iter(self._of_clients))]
            found = self._of_clients[client] = replace(self, client=client, _of_clients={})
        return found

    @property
    def of_all_models(self) -> "tuple[AppState, ...]":
        """States of all models, this one first."""
        return self, *self.others

    async def of_model(self, name: str) -> "AppState":
        """Return the state of the model with this name, or of the model whose LoRA adapter has this name.

        Raises:
            ModelNotFoundError: this server does not serve the model.
            InvalidRequestError: the name is that of an adapter that cannot be used.
        """
        for one in self.of_all_models:
            if name in one.client.facts.served_model_names or name in one.client.adapters.named:
                return one
        for one in self.of_all_models:
            if await one.client.adapters.find(name) is not None:
                return one
        raise self._not_served(name)

    def now(self) -> int:
        """Return the Unix time of a response in seconds."""
        return int(time.time())

    async def choose_model(self, requested: str | None) -> tuple[str, Adapter | None]:
        """Return the model name for the response, which the call records, and the LoRA adapter that it selects.

        Raises:
            ModelNotFoundError: this server does not serve `requested`.
            InvalidRequestError: `requested` is an adapter that cannot be used.
        """
        names, adapter = self.client.facts.served_model_names, None
        name = names[0] if requested is None else requested
        if name not in names:
            if (found := await self.client.adapters.find(name)) is None:
                raise self._not_served(name)
            adapter = found.adapter
        if (call := CURRENT_CALL.get()) is not None:
            call.model = name
        return name, adapter

    def _not_served(self, name: str) -> ModelNotFoundError:
        clients = [state.client for state in self.of_all_models]
        names = [one for client in clients for one in (*client.facts.served_model_names, *client.adapters.named)]
        shown = [repr(one) for one in names[:MAX_NAMES]] + ["one of GET /v1/models"] * (len(names) > MAX_NAMES)
        return ModelNotFoundError(f"the model {name!r} is not served here: use {' or '.join(shown)}")


def answer_style(
    state: AppState,
    request: SamplingFields,
    answer_id: str,
    model: str,
    num_logprobs: int | None,
    chat: AnswerRendering = AnswerRendering(),
    recorder: Recorder | None = None,
) -> AnswerStyle:
    """Return how to render a response; `chat`: how outputs become messages; `recorder`: makes the receipt."""
    settings = state.answers
    options = request.stream_options or StreamOptions()
    has_usage = bool(options.include_usage) or state.forces_usage
    as_ids = request.return_tokens_as_token_ids
    if as_ids is None:
        as_ids = settings.names_are_ids
    tokenizer = state.client.tokenizer
    return AnswerStyle(
        id=answer_id,
        created=state.now(),
        model=model,
        names=TokenNames(tokenizer, as_ids=as_ids or tokenizer.is_absent),
        fingerprint=settings.fingerprint.of(state.client.config, state.client.facts.weights_digest),
        num_logprobs=num_logprobs,
        chat=chat,
        names_logprobs=bool(request.logprob_token_ids),
        has_token_ids=tokenizer.is_absent if request.return_token_ids is None else request.return_token_ids,
        has_weight_versions=request.return_weight_versions,
        has_usage=has_usage,
        has_running_usage=state.forces_usage or (has_usage and bool(options.continuous_usage_stats)),
        has_metrics=settings.has_metrics,
        recorder=recorder,
    )


RECEIPT_HEADER = "x-octavo-receipt"
"""Header of a request: 1 requests a receipt. Header of a response: the digest of its receipt."""


def receipt_recorder(
    state: AppState, http_request: ApiRequest, body: bytes, *, is_asked: bool = False, path: str | None = None
) -> Recorder | None:
    """Return the recorder that makes the receipt of a response; `None` if neither the client nor the log wants one.

    Args:
        state: the state of the application.
        http_request: the HTTP request of the client.
        body: the request body.
        is_asked: whether the body has `return_receipt`.
        path: the path of the route that the body is for; None: the path of the request.

    Raises:
        InvalidRequestError: the header has a value other than 0 and 1.
    """
    header = header_value(http_request.scope, RECEIPT_HEADER.encode())
    if header not in ("", "0", "1"):
        raise InvalidRequestError(f"the header {RECEIPT_HEADER} must be 1 or 0, got {header!r}", RECEIPT_HEADER)
    is_shown = is_asked or header == "1"
    if state.receipts is None and not is_shown:
        return None
    path = path or route_path(http_request.scope)
    return Recorder(state.client, path, body, state.receipts, is_shown=is_shown)
