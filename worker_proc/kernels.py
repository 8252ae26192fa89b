"""Open the native library that the configuration selects, and bind its threads to cores."""

import logging

from octavo.kernels.native.build import NativeUnavailable, Phase, Toolchain
from octavo.kernels.native.library import NativeLibrary, choose_kernels
from octavo.kernels.native.threads import bind_threads
from octavo.kernels.paged_attention.layout import MAX_HEAD_DIM
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.cores import usable_cores
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError

logger = logging.getLogger(__name__)


def open_kernels(
    config: ResolvedConfig, env: Env, phase: Phase, *, number: int = 0, has_other_nodes: bool = False
) -> NativeLibrary | None:
    """Return the native library, compiled if necessary; `None` if the worker computes through torch.

    Args:
        config: selects kernels, number of threads and cores.
        env: cache directory of compiled libraries, and the compiler.
        phase: reports a compilation as a start-up phase.
        number: index of this worker among all on the machine. It takes the cores after those of lower indices.
        has_other_nodes: whether the engine has other machines. Then "auto" means native, because another machine may
            have a compiler, and all machines must use the same kernels.

        Raises:
            ConfigError: native kernels are required but not available, or a core does not exist.
    """
    library = _choose(config, env, phase, has_other_nodes=has_other_nodes)
    if config.cpu_binding == "none":
        return library
    if library is None:
        logger.warning("--cpu-binding has no effect: it binds the threads of the native kernels, which are off")
        return None
    cores = usable_cores() if config.cpu_binding == "compact" else config.cpu_binding
    first = number * config.num_threads
    num_workers = max(number + 1, config.world_size * config.data_parallel_size)
    if len(cores) < num_workers * config.num_threads:
        raise ConfigError(
            f"--cpu-binding {config.cpu_binding}: {num_workers} workers with {config.num_threads} threads each need "
            f"{num_workers * config.num_threads} cores, and there are {len(cores)}",
            hint="use --cpu-binding none, fewer workers or a smaller --num-threads",
        )
    try:
        bind_threads(library, cores[first : first + config.num_threads])
    except OSError as error:
        raise ConfigError(f"--cpu-binding: {error}", hint="name cores that this process may use") from error
    return library


def _choose(config: ResolvedConfig, env: Env, phase: Phase, *, has_other_nodes: bool) -> NativeLibrary | None:
    head_dim = config.model.head_dim
    if config.cpu_kernels == "torch":
        logger.info("computing with torch's operations (--cpu-kernels torch)")
        return None
    if head_dim > MAX_HEAD_DIM:
        reason = f"attention heads of {head_dim} dimensions; native kernels have at most {MAX_HEAD_DIM}"
        if config.cpu_kernels == "native":
            raise ConfigError(f"--cpu-kernels native: {reason}", hint="use --cpu-kernels auto")
        logger.warning("no native kernels: %s. Computing with torch's operations, several times slower", reason)
        return None
    toolchain = Toolchain(cache_dir=env.cache_dir, compiler=env.cxx)
    try:
        return choose_kernels("native" if has_other_nodes else config.cpu_kernels, toolchain=toolchain, phase=phase)
    except NativeUnavailable as error:
        hint = f"{error.hint}; or give --cpu-kernels torch to all nodes" if has_other_nodes else error.hint
        raise ConfigError(f"--cpu-kernels {config.cpu_kernels}: {error.reason}", hint=hint) from error
