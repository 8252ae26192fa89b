"""Turns the configuration into the state of the routes. Invalid settings are reported before serving begins."""

import sqlite3
from pathlib import Path

import msgspec

from octavo.frontend.batch.directory import BatchDirectory
from octavo.frontend.batch.service import BatchService
from octavo.frontend.calls.services import Tenants
from octavo.frontend.client import AsyncClient
from octavo.frontend.conversation.settings import AUTO, ChatSettings
from octavo.frontend.http.app_state import AppState, Execute
from octavo.frontend.http.background import BackgroundTasks
from octavo.frontend.http.background_responses import BackgroundResponses
from octavo.frontend.http.render.answer import AnswerSettings
from octavo.frontend.http.request_log import RequestLog
from octavo.frontend.http.response_store import ResponseStore
from octavo.frontend.http.routes.engine import usable_directory
from octavo.frontend.lora.startup import open_resolver
from octavo.frontend.metrics.buckets import read_buckets
from octavo.frontend.metrics.exporter import Metrics
from octavo.frontend.metrics.shared_counters import SharedCounters
from octavo.frontend.receipts.log import ReceiptLog
from octavo.frontend.vllm_environment import server_with_variables
from octavo.protocol.config import ServerConfig
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError, InvalidRequestError

RESPONSES_FILE = "responses.db"
"""Name of the response store that several HTTP processes share if `--response-store` is not given."""


def make_app_state(
    client: AsyncClient,
    config: ServerConfig,
    counters: SharedCounters | None = None,
    execute: Execute | None = None,
    background: BackgroundTasks | None = None,
) -> AppState:
    """Return the state of the routes. The metrics observe the client, unless it has another observer.

    Args:
        client: the client of the engine.
        config: the configuration of the server.
        counters: shared storage of the metrics; None: storage private to this process.
        execute: executes commands of operators.
        background: the server's background tasks; None: nobody waits for work that outlives its request.

    Raises:
        ConfigError: the configured chat template cannot be read; the directory of the profiler or of the receipts or
        the response store cannot be used; or a parser does not exist.
    """
    config = server_with_variables(config, Env.read())
    metrics = client.observer
    if not isinstance(metrics, Metrics):
        metrics = Metrics(
            client.config,
            max_model_len=client.facts.max_model_len,
            engine_blocks=lambda: {index: facts.num_blocks for index, facts in client.facts_by_engine().items()},
            has_vllm_names=config.enable_vllm_metrics,
            counters=counters,
            buckets=read_buckets(config.custom_histogram_buckets),
        )
        client.observer = client.observer or metrics
    state = AppState(
        client,
        metrics,
        trusts_request_templates=config.trust_request_chat_template,
        max_n_sequences=config.max_n_sequences,
        max_stop_strings=config.max_stop_strings,
        chat=chat_settings(client, config),
        profiler_dir=_usable(config.torch_profiler_dir, "--torch-profiler-dir"),
        forces_usage=config.enable_force_include_usage,
        request_log=RequestLog.of(config),
        receipts=_receipts(config),
        background_responses=BackgroundResponses(_responses(config), background),
        answers=AnswerSettings.of(config),
        stall_deadline_s=config.watchdog_timeout,
        keep_alive_s=config.sse_keep_alive_interval,
        execute=execute,
    )
    _check_chat_template(state)
    # Soft prompts need no slots.
    has_adapters = client.config.lora is not None or client.config.enable_prompt_embeds
    open_resolver(config, client.adapters, has_adapters=has_adapters)
    return state


def chat_settings(client: AsyncClient, config: ServerConfig) -> ChatSettings:
    """Return how a server handles conversations; the tool parser "auto" follows from the model's chat template.

    Raises:
        ConfigError: a parser does not exist, or another flag is wrong.
    """
    if config.tool_call_parser != AUTO:
        return ChatSettings.of(config)
    try:
        template = client.chat_template(config.chat_template_content_format)
    except InvalidRequestError as error:
        hint = "name the tool parser, or give a --chat-template"
        raise ConfigError(error.message, hint=hint) from None
    return ChatSettings.of(config, template)


def _usable(path: str | None, flag: str) -> Path | None:
    if path is None:
        return None
    try:
        return usable_directory(Path(path).resolve())
    except OSError as error:
        message = f"{path} cannot be written to: {error.strerror}"
        raise ConfigError(message, hint=f"choose another {flag}") from None


def _receipts(config: ServerConfig) -> ReceiptLog | None:
    directory = _usable(config.receipts, "--receipts")
    return None if directory is None else ReceiptLog(directory, config.receipts_max_bytes)


def require_no_batches(config: ServerConfig) -> None:
    """Reject `batch_dir` if nothing would run the batches.

    Raises:
        ConfigError: `batch_dir` is set.
    """
    if config.batch_dir is not None:
        raise ConfigError(
            "batch_dir is for octavo serve: nothing runs batches here",
            hint="leave it out; octavo run-batch runs a file of requests without a server",
        )


def batch_service(config: ServerConfig, tasks: BackgroundTasks, tenants: Tenants | None = None) -> BatchService | None:
    """Return the service that runs batches; `None` without `--batch-dir`.

    Args:
        config: the configuration of the server.
        tasks: the tasks of the server.
        tenants: the tenants of the server; None: there are none.

    Raises:
        ConfigError: the directory cannot be used, or a package is missing.
    """
    if config.batch_dir is None:
        return None
    try:
        import python_multipart  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--batch-dir needs python-multipart, which is not installed", hint='pip install "octavo[batch]"'
        ) from None
    path = _usable(config.batch_dir, "--batch-dir")
    assert path is not None, "a path was given"
    try:
        directory = BatchDirectory(path, config.batch_dir_max_bytes)
    except OSError as error:
        raise ConfigError(
            f"--batch-dir {path} cannot be used: {error.strerror}",
            hint="choose a directory that this user may write to, on a file system with hard links",
        ) from None
    return BatchService(directory, tasks, tenants)


def with_shared_responses(config: ServerConfig, directory: Path) -> ServerConfig:
    """Return the configuration of one of several HTTP processes, which must share their stored responses.

    Args:
        config: the configuration of the server.
        directory: shared by all HTTP processes.
    """
    if config.api_server_count == 1 or config.response_store is not None:
        return config
    return msgspec.structs.replace(config, response_store=str(directory / RESPONSES_FILE))


def _responses(config: ServerConfig) -> ResponseStore:
    try:
        return ResponseStore(config.response_store)
    except sqlite3.Error as error:
        raise ConfigError(
            f"{config.response_store} cannot be used: {error}",
            hint="--response-store names an SQLite database in a directory that exists; it is made if it is missing",
        ) from None


def _check_chat_template(state: AppState) -> None:
    """Report an invalid configured template at startup, not at the first request. A model may have no template."""
    if state.client.config.chat_template is not None:
        try:
            _ = state.chat_context.chat_template
        except InvalidRequestError as error:
            raise ConfigError(error.message) from None


def admin_keys(config: ServerConfig) -> list[str]:
    """Return the accepted keys of operators: from the command line, else from the environment."""
    from_environment = Env.read().admin_api_key
    return config.admin_api_key or ([from_environment] if from_environment else [])


def has_dev_routes(config: ServerConfig) -> bool:
    """Return whether clients may put the engine to sleep and replace its weights."""
    return config.enable_dev_routes or Env.read().is_dev_mode


def api_keys(config: ServerConfig) -> list[str]:
    """Return the accepted keys: from the command line, else from the environment."""
    from_environment = Env.read().api_key
    return config.api_key or ([from_environment] if from_environment else [])
