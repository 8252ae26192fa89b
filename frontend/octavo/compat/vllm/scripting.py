"""Small functions and classes that scripts import from vLLM's modules."""

import gc
import platform
import resource
import socket
from collections.abc import Sequence
from enum import StrEnum
from typing import Any


def get_ip() -> str:
    """Return the address at which other machines reach this one; 127.0.0.1 if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a reserved address; no packet is sent
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def get_open_port() -> int:
    """Return a port of this machine that is currently free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Counter:
    """Counts up from a start value: `next(counter)`."""

    def __init__(self, start: int = 0) -> None:
        self.counter = start

    def __next__(self) -> int:
        self.counter += 1
        return self.counter - 1

    def reset(self) -> None:
        """Restart at 0."""
        self.counter = 0


def print_embeddings(embeds: Sequence[Any], prefix: str = "Embeddings") -> None:
    """Print the beginning and the length of a vector."""
    shown = f"{str(list(embeds[:4]))[:-1]}, ...]" if len(embeds) > 4 else str(list(embeds))
    print(f"{prefix}: {shown} (size={len(embeds)})")  # noqa: T201


def set_ulimit(target_soft_limit: int = 65535) -> None:
    """Raise the limit of open files as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = target_soft_limit if hard == resource.RLIM_INFINITY else min(target_soft_limit, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Collect garbage, so that an unreferenced `LLM` stops its processes now."""
    del shutdown_ray
    gc.collect()


class UsageContext(StrEnum):
    """Purpose of an engine. Ignored: octavo reports no usage."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class _Platform:
    """The machine, as `vllm.platforms.current_platform` describes it."""

    @property
    def device_type(self) -> str:
        """ "cuda" or "cpu"."""
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def device_name(self) -> str:
        """Name of the CPU."""
        return platform.processor() or platform.machine()

    def is_cuda(self) -> bool:
        """Return whether there is an NVIDIA GPU."""
        return self.device_type == "cuda"

    def is_cpu(self) -> bool:
        """Return whether models run on the CPU."""
        return self.device_type == "cpu"

    def is_cuda_alike(self) -> bool:
        """Return whether there is a GPU with CUDA's interface."""
        return self.is_cuda()

    def is_rocm(self) -> bool:
        """Return False: octavo does not run on ROCm."""
        return False

    def is_xpu(self) -> bool:
        """Return False: octavo does not run on XPUs."""
        return False

    def is_tpu(self) -> bool:
        """Return False: octavo does not run on TPUs."""
        return False


current_platform = _Platform()


def hf_api() -> Any:
    """Return the client of the model hub."""
    import huggingface_hub

    return huggingface_hub.HfApi()
