"""The configuration of a server's engines: read from flags and model files, and divided among several engines."""

import time

import msgspec

from octavo.frontend.device import detect_device
from octavo.frontend.model_files.facts import read_head_facts, read_model_facts
from octavo.frontend.timeline import Timeline
from octavo.frontend.vllm_environment import engine_with_variables
from octavo.protocol.config import EngineConfig, ResolvedConfig, resolve
from octavo.protocol.cores import num_usable_cores
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError


def read_config(config: EngineConfig, timeline: Timeline | None = None) -> ResolvedConfig:
    """Resolve the user's settings against the model's files; `timeline` records the duration.

    Blocks until: a download or conversion, if needed, has finished.

    Raises:
        ConfigError: a setting or a file is invalid.
    """
    if config.parallel.data_parallel_backend == "ray":
        raise ConfigError(
            "data_parallel_backend ray: only octavo serve, with HTTP, starts engines on other machines",
            hint="leave out --data-parallel-backend, or join the engines of a server by their addresses",
        )
    env, start = Env.read(), time.monotonic()
    facts, device = read_model_facts(config.model, env), detect_device(hides_gpus=env.hides_gpus)
    config = engine_with_variables(config, env, device)
    head, num_cores = read_head_facts(config, facts, env), num_usable_cores()
    resolved = resolve(config, facts, device=device, num_cores=num_cores, head=head)
    if timeline is not None:
        timeline.add("Frontend", "reading model files", time.monotonic() - start)
    return resolved


def configs_of_engines(config: ResolvedConfig) -> list[ResolvedConfig]:
    """Return one configuration per engine; the engines share the requests."""
    return [config_of_engine(config, index) for index in range(config.data_parallel_size)]


def config_of_engine(config: ResolvedConfig, index: int, place: int | None = None) -> ResolvedConfig:
    """Return the configuration of one of several engines.

    Args:
        config: configuration of all engines.
        index: index of the engine.
        place: number that determines its GPUs and cores. `None`: the same as `index`.
    """
    record_steps = config.record_steps
    if record_steps and index:  # each core writes a recording of its own
        record_steps = f"{record_steps}.engine{index}"
    place = index if place is None else place
    return msgspec.structs.replace(config, engine_index=index, engine_place=place, record_steps=record_steps)


def addresses_of_engines(address: str, num_engines: int) -> list[str]:
    """Return the addresses at which applications join several engines, derived from the first engine's address.

    `tcp://host:5555` is followed by `tcp://host:5556`, `ipc:///run/engine` by `ipc:///run/engine.1`.

    Raises:
        ConfigError: a tcp address names no port.
    """
    if not address.startswith("tcp://"):
        return [f"{address}.{index}" if index else address for index in range(num_engines)]
    host, _, port = address.rpartition(":")
    if num_engines > 1 and not port.isdecimal():
        raise ConfigError(
            f"{address} names no port, after which the other engines could listen",
            hint="an address of several engines looks like tcp://127.0.0.1:5555",
        )
    return [f"{host}:{int(port) + index}" if index else address for index in range(num_engines)]
