"""`/load`, `/server_info`, `/reset_prefix_cache`, `/start_profile`, `/stop_profile`: for operators of the server."""

from pathlib import Path
from tempfile import TemporaryFile

import msgspec
from starlette.responses import Response

from octavo.frontend.http.app_state import AppState
from octavo.frontend.http.dependencies import CurrentState
from octavo.frontend.http.errors import rejection
from octavo.frontend.http.request import JSON
from octavo.frontend.http.schemas.engine import Done, Load, ServerInfo
from octavo.protocol.errors import InvalidRequestError
from octavo.protocol.version import __version__


async def load(state: CurrentState) -> Response:
    """Return how many requests run or wait, in all HTTP processes."""
    return _answer(Load(sum(one.metrics.num_live_requests for one in state.of_all_models)))


async def server_info(state: CurrentState) -> Response:
    """Return the served models and the configuration."""
    facts = state.client.facts
    info = ServerInfo(
        version=__version__,
        models=facts.served_model_names,
        max_model_len=facts.max_model_len,
        num_blocks=facts.num_blocks,
        config=msgspec.to_builtins(state.client.config),
    )
    return _answer(info)


async def reset_prefix_cache(state: CurrentState) -> Response:
    """Drop all cached prefixes, unless requests are using the cache."""
    if await state.client.reset_prefix_cache():
        return _answer(Done())
    return rejection(409, "the prefix cache is in use by running requests: try again when there are none")


async def start_profile(state: CurrentState) -> Response:
    """Start to record a profiler trace in every worker. A recording in progress continues."""
    directory = _profiler_dir(state)
    await state.client.start_profile(str(directory))
    return _answer(Done(directory=str(directory)))


async def stop_profile(state: CurrentState) -> Response:
    """Stop recording, if a recording is in progress; each worker writes its trace."""
    directory = _profiler_dir(state)
    await state.client.stop_profile()
    return _answer(Done(directory=str(directory)))


def _profiler_dir(state: AppState) -> Path:
    """Return the directory for profiler traces.

    Raises:
        InvalidRequestError: none is configured, or it is no longer writable, which would terminate a worker.
    """
    if state.profiler_dir is None:
        raise InvalidRequestError("this server writes no traces: start it with --torch-profiler-dir DIRECTORY")
    try:
        return usable_directory(state.profiler_dir)
    except OSError as error:
        raise InvalidRequestError(f"{state.profiler_dir} cannot be written to: {error.strerror}") from None


def usable_directory(path: Path) -> Path:
    """Create a directory if necessary, and return it if it is writable.

    Raises:
        OSError: the directory cannot be created or is not writable.
    """
    path.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(dir=path):
        return path


def _answer(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type=JSON)
