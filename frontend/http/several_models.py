"""Several models behind one server: checks of the engines that it joins, and one view of all of them."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from octavo.frontend.client import AsyncClient
from octavo.protocol.config import ServerConfig
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError, EngineDeadError


class ServedEngines:
    """The engines of all models, with the interface that `Server` needs.

    Args:
        clients: one per model.
    """

    def __init__(self, clients: Sequence[AsyncClient]) -> None:
        self._clients = clients

    @property
    def failure(self) -> EngineDeadError | None:
        """Why no model can be served any more; `None` while at least one can."""
        failures = [client.failure for client in self._clients]
        return failures[0] if all(failures) else None

    @property
    def num_live_requests(self) -> int:
        """Number of running and waiting requests."""
        return sum(client.num_live_requests for client in self._clients)

    def abort_all(self) -> None:
        """Abort every request. Clients get the output generated so far."""
        for client in self._clients:
            client.abort_all()


def check_join(config: ServerConfig) -> None:
    """Verify the flags of a server that joins engines.

    Raises:
        ConfigError: a flag does not work with several models.
    """
    if len(config.join or ()) > 1 and config.api_server_count > 1:
        raise ConfigError(
            "several HTTP processes serve the engines of one model only",
            hint="leave out --api-server-count, or separate the addresses of engines of one model by commas",
        )


def check_names(clients: Sequence[AsyncClient], addresses: Sequence[str]) -> None:
    """Check that every name refers to one model, and reserve the models' names so that no adapter can take them.

    Args:
        clients: one per model.
        addresses: the addresses of their engines.

    Raises:
        ConfigError: two models have the same name.
    """
    counts = Counter(name for client in clients for name in set(client.facts.served_model_names))
    for name, count in counts.items():
        if count > 1:
            owners = [
                address
                for client, address in zip(clients, addresses, strict=True)
                if name in client.facts.served_model_names
            ]
            raise ConfigError(
                f"the engines at {' and '.join(owners)} both serve {name!r}",
                hint="start one with another --served-model-name; separate addresses of engines of one model by commas",
            )
    for client in clients:
        client.adapters.is_taken = _Names([other for other in clients if other is not client]).__contains__


class _Names:
    """The current names of models and of their adapters."""

    def __init__(self, clients: Sequence[AsyncClient]) -> None:
        self._clients = clients

    def __contains__(self, name: str) -> bool:
        return any(name in one.facts.served_model_names or name in one.adapters.named for one in self._clients)


def config_of_each(config: ServerConfig, clients: Sequence[AsyncClient]) -> list[ServerConfig]:
    """Return the configuration for each model. Flags about adapters apply to the only model whose engine has adapters.

    Raises:
        ConfigError: several engines have adapters, so it is unclear which engine a flag concerns.
    """
    can_load = [client.config.lora is not None or client.config.enable_prompt_embeds for client in clients]
    if len(clients) == 1 or not any(can_load):
        return [config] * len(clients)
    if sum(can_load) > 1 and (config.lora_modules or config.lora_resolver_dir or Env.read().lora_resolver_dir):
        raise ConfigError(
            "--lora-modules and --lora-resolver-dir are for one model, but several engines have adapters",
            hint="load adapters with /v1/load_lora_adapter?model=NAME, under --allow-runtime-lora-updating",
        )
    without = msgspec.structs.replace(
        config, lora_modules=None, lora_resolver_dir=None, allow_runtime_lora_updating=False
    )
    return [config if can else without for can in can_load]
