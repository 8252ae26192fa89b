"""`EngineStarter`: starts engines of a server's configuration, and joins running ones."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from octavo.frontend.client import AsyncClient
from octavo.frontend.engine_configs import config_of_engine, read_config
from octavo.frontend.engine_connection import EngineConnection, follow_engine, model_tokenizer
from octavo.frontend.engine_state import EngineState
from octavo.frontend.membership.messages import EngineEntry
from octavo.frontend.recovery.replacement import require_same_tokens
from octavo.frontend.spawn import spawn_engine
from octavo.frontend.timeline import Timeline
from octavo.protocol.config import EngineConfig, ResolvedConfig
from octavo.protocol.errors import ConflictError


class EngineStarter:
    """Starts and joins engines for a client. They must have the same tokens as the client's engines.

    Args:
        client: for which the engines are meant.
        read: reads the engines' configuration again. `None`: this server starts no engines.
        join: joins a running engine.
    """

    def __init__(
        self,
        client: AsyncClient,
        read: Callable[[], EngineConfig] | None,
        join: Callable[[EngineEntry], Awaitable[EngineConnection]],
    ) -> None:
        self.starting: dict[int, str] = {}
        """Addresses of the engines that are being started or joined, by index."""
        self._client = client
        self._read = read
        self._join = join

    async def configuration(self, model: str | None) -> ResolvedConfig:
        """Return the configuration of new engines: the server's, with another model if one is given.

        Raises:
            ConflictError: this server starts no engines.
            ConfigError: a setting or the model is invalid, or the model has other tokens.
        """
        if self._read is None:
            message = "this server has joined its engines: give the address of another one, or start it there"
            raise ConflictError(message)
        config = self._read()
        if model is not None:
            config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, model=model))
        resolved = await asyncio.to_thread(read_config, config)
        await self.require_same_tokens(resolved)
        if model is not None:  # callers continue to use the names that they know
            resolved = msgspec.structs.replace(resolved, served_model_names=self._client.config.served_model_names)
        return resolved

    async def require_same_tokens(self, new: ResolvedConfig) -> None:
        """Check that the client can use engines of a configuration.

        Raises:
            ConfigError: their model has other tokens.
        """
        client = self._client
        tokenizer = await asyncio.to_thread(model_tokenizer, new.model)
        await client.run_in_thread(lambda: require_same_tokens(client.config, client.tokenizer, new, tokenizer))

    async def start(self, index: int, place: int, config: ResolvedConfig) -> EngineConnection:
        """Start an engine and wait until it is ready; see `config_of_engine`.

        Raises:
            StartupError: the engine could not start. The error names the root cause.
        """
        spawned = spawn_engine(config_of_engine(config, index, place), Timeline())
        self.starting[index] = spawned.address
        try:
            return await follow_engine(spawned, None)
        finally:
            del self.starting[index]

    async def join(self, index: int, address: str, public_key_file: str | None) -> EngineConnection:
        """Join a running engine.

        Raises:
            StartupError: no engine answers on `address`.
        """
        self.starting[index] = address
        try:
            return await self._join(EngineEntry(index, address, EngineState.STARTING, public_key_file=public_key_file))
        finally:
            del self.starting[index]
