"""`--kv-events-config`: where the core publishes changes of its prefix cache, for external routers."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octavo.protocol.errors import ConfigError

_Count = Annotated[int, Meta(ge=1)]


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's settings of the same names."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    """None means zmq if events are enabled."""
    endpoint: str = "tcp://127.0.0.1:5557"
    """Endpoint of engine 0's PUB socket. Other engines add their index to the port, or to the path of ipc://.

    The endpoint is bound if the host is `*`, `::` or this machine's loopback, and connected otherwise. vLLM's default
    is tcp://*:5557, which exposes all prompts to everybody who can reach the machine.
    """
    replay_endpoint: str | None = None
    """Endpoint of a ROUTER socket that replays batches."""
    buffer_steps: _Count = 10_000
    """Number of batches that can be replayed."""
    hwm: _Count = 100_000
    """Number of batches queued for a slow subscriber. It loses later ones."""
    max_queue_size: _Count = 100_000
    """Number of batches that may wait to be published. Later ones are dropped."""
    topic: str = ""


def read_kv_events(setting: Mapping[str, Any] | str | None) -> KVEventsConfig | None:
    """Return the configuration. Return None if nothing is published.

    Raises:
        ConfigError: the setting is not such an object.
    """
    if not setting:
        return None
    try:
        if isinstance(setting, str):
            config = msgspec.json.decode(setting, type=KVEventsConfig)
        else:
            config = msgspec.convert(setting, KVEventsConfig)
    except msgspec.DecodeError as error:  # `convert` raises this too
        raise ConfigError(
            f"kv_events_config: {error}",
            hint=f"it is a JSON object with some of {', '.join(KVEventsConfig.__struct_fields__)}",
        ) from None
    for name in ("endpoint", "replay_endpoint"):
        value = getattr(config, name)
        if value is not None and not value.startswith(("tcp://", "ipc://")):
            raise ConfigError(
                f"kv_events_config: {name} {value!r} is no address", hint="use tcp://127.0.0.1:5557 or ipc:///path"
            )
    is_published = config.enable_kv_cache_events and config.publisher != "null"
    return config if is_published else None


def endpoint_of_engine(endpoint: str, engine_index: int) -> str:
    """Return the endpoint of one of several engines: its port (unless 0, any), or the path of its socket, differs.

    Raises:
        ConfigError: the port is not a number.
    """
    if not engine_index:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{engine_index}"
    base, _, port = endpoint.rpartition(":")
    if not port.isdigit():
        raise ConfigError(
            f"kv_events_config: {endpoint} has no port",
            hint="several engines publish on consecutive ports: name the first",
        )
    return f"{base}:{int(port) + engine_index}" if int(port) else endpoint
