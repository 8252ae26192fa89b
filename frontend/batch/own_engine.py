"""`serving`: runs an engine for one command, behind the routes of a server without sockets."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.types import ASGIApp

from octavo.frontend.client import AsyncClient
from octavo.frontend.conversation.settings import ChatSettings
from octavo.frontend.http.app import make_app
from octavo.frontend.http.configure import make_app_state, require_no_batches
from octavo.frontend.lora.startup import check_flags, load_modules
from octavo.protocol.config import EngineConfig, ServerConfig


@asynccontextmanager
async def serving(config: EngineConfig, server: ServerConfig) -> AsyncGenerator[tuple[AsyncClient, ASGIApp]]:
    """Start an engine; yield its client and the application for `asgi_call`.

    Raises:
        ConfigError: a flag is invalid.
        StartupError: the engine cannot start.
    """
    # Reject invalid flags before the engine starts.
    ChatSettings.of(server)
    require_no_batches(server)
    check_flags(server, has_adapters=config.lora.enable_lora)
    async with AsyncClient.launch(config=config) as client:
        await load_modules(server, client.adapters)
        yield client, make_app(make_app_state(client, server), server, keys=())
