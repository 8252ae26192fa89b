"""The native library of a worker, as its configuration wants it: chosen, and its threads bound to cores."""

from octavo.kernels.native.build import NativeUnavailable, Phase, Toolchain
from octavo.kernels.native.library import NativeLibrary, choose_kernels
from octavo.kernels.native.threads import bind_threads
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.cores import usable_cores
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError


def open_kernels(config: ResolvedConfig, env: Env, phase: Phase) -> NativeLibrary | None:
    """Return the native library, compiled if need be, or None: the worker computes through torch.

    Args:
        config: which kernels, how many threads, on which cores.
        env: where compiled libraries are kept, and the compiler.
        phase: told when something is compiled.

    Raises:
        ConfigError: native kernels are asked for and cannot be had, or the cores are not there.
    """
    toolchain = Toolchain(cache_dir=env.cache_dir, compiler=env.cxx)
    try:
        library = choose_kernels(config.cpu_kernels, toolchain=toolchain, phase=phase)
    except NativeUnavailable as error:
        raise ConfigError(f"--cpu-kernels native: {error.reason}", hint=error.hint) from error
    if library is not None and config.cpu_binding != "none":
        cores = usable_cores() if config.cpu_binding == "compact" else config.cpu_binding
        try:
            bind_threads(library, cores[: config.num_threads])
        except OSError as error:
            raise ConfigError(f"--cpu-binding: {error}", hint="name cores that this process may use") from error
    return library
