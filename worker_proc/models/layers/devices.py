"""Features of models that only CPUs have kernels for."""

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.parameters import Parameters


def require_cpu(parameters: Parameters, feature: str) -> None:
    """Reject a GPU for a feature of the model, before any weight is read.

    Raises:
        ConfigError: the device is a GPU.
    """
    if parameters.device.type == "cuda":
        raise ConfigError(f"GPUs have no kernels for {feature}, which this model has", hint="run with --device cpu")
