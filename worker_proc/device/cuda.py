"""An NVIDIA GPU as a device: checks that it is usable and measures its memory. `cuda_stream` launches work on it."""

import torch

from octavo.kernels import programmatic_launch
from octavo.protocol.env import set_default
from octavo.protocol.errors import StartupError
from octavo.worker_proc.device.base import Device
from octavo.worker_proc.device.cuda_stream import CudaStream

MIN_CAPABILITY = (8, 0)
"""Ampere, the first architecture with bfloat16 products."""
FP8_CAPABILITY = (8, 9)
"""Ada, the first architecture with conversions to and from float8_e4m3fn."""

_PHASE = "opening the device"
_USE_CPU = "use --device cpu"


class CudaDevice(Device):
    """The GPU of this rank.

    Args:
        index: index of the GPU among those that this process sees.
        is_deterministic: prevent cuBLAS from splitting sums by the number of rows. Affects the whole process, and only
            if nothing was computed before.
        has_fp8_cache: whether keys and values are stored in 8 bits.
        launches_early: let kernels begin before the previous kernel ends. Affects the whole process.

    Raises:
        StartupError: this torch is not built for CUDA, or the GPU does not exist or is too old.
    """

    def __init__(
        self, index: int, *, is_deterministic: bool, has_fp8_cache: bool = False, launches_early: bool = False
    ) -> None:
        if not torch.backends.cuda.is_built():
            raise StartupError(
                f"torch {torch.__version__} is not built for CUDA",
                phase=_PHASE,
                hint=f"install a build of torch for CUDA (https://pytorch.org), or {_USE_CPU}",
            )
        prepare_products(is_deterministic=is_deterministic)
        if index >= torch.cuda.device_count():
            raise StartupError(
                f"there is no GPU {index}: torch sees {torch.cuda.device_count()}",
                phase=_PHASE,
                hint=f"check nvidia-smi and CUDA_VISIBLE_DEVICES, or {_USE_CPU}",
            )
        try:
            capability = torch.cuda.get_device_capability(index)
            torch.cuda.set_device(index)
            torch.cuda.init()
        except RuntimeError as error:  # the driver is too old, or another process uses the GPU exclusively
            raise StartupError(f"GPU {index} cannot be used: {error}", phase=_PHASE, hint=_USE_CPU) from error
        self.name = torch.cuda.get_device_name(index)
        if capability < MIN_CAPABILITY:
            raise StartupError(
                f"{self.name} has compute capability {capability[0]}.{capability[1]}; "
                f"the kernels need {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} (Ampere) or newer",
                phase=_PHASE,
                hint=_USE_CPU,
            )
        if has_fp8_cache and capability < FP8_CAPABILITY:
            raise StartupError(
                f"{self.name} has no float8_e4m3fn, in which --kv-cache-dtype fp8 keeps keys and values",
                phase=_PHASE,
                hint="leave out --kv-cache-dtype",
            )
        if launches_early and capability < programmatic_launch.MIN_CAPABILITY:
            raise StartupError(
                f"{self.name} cannot launch kernels before the kernel ahead of them ends",
                phase=_PHASE,
                hint="unset OCTAVO_EARLY_LAUNCH",
            )
        programmatic_launch.enable(launches_early)
        self.torch_device = torch.device("cuda", index)
        self._stream = CudaStream(self.torch_device)
        _, self.total_bytes = torch.cuda.mem_get_info(index)
        self._free_at_reset = self._reserved_at_reset = 0

    def free_bytes(self) -> int:
        """Return the memory that the driver reports as free, after torch's allocator has released its cache."""
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return free

    def stream(self) -> CudaStream:
        """Return the stream of this process."""
        return self._stream

    def reset_peak(self) -> None:
        """Start to measure a new peak."""
        torch.cuda.synchronize(self.torch_device)
        self._free_at_reset = self.free_bytes()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        self._reserved_at_reset = torch.cuda.memory_reserved(self.torch_device)

    def peak_growth_bytes(self) -> int:
        """Return how far this process's memory rose above its size at `reset_peak`.

        torch's allocator keeps freed memory, so the driver's count still contains the peak of its allocations, and also
        the memory of libraries and of kernel code.
        """
        torch.cuda.synchronize(self.torch_device)
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        own = torch.cuda.max_memory_reserved(self.torch_device) - self._reserved_at_reset
        return max(own, self._free_at_reset - free)


def prepare_products(*, is_deterministic: bool) -> None:
    """Configure cuBLAS and cuDNN for this process. Call it before the first CUDA call: cuBLAS reads its variables once.

    A split-K product needs a workspace for its partial sums. Without a workspace cuBLAS computes each output in one
    pass over its inputs.
    """
    if is_deterministic:
        set_default("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        set_default("CUBLASLT_WORKSPACE_SIZE", "1")
        torch.backends.cuda.preferred_blas_library("cublaslt")
        torch.backends.cudnn.deterministic = True
    # Accumulate in float32, and never round float32 products to TF32: the user chose float32.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
