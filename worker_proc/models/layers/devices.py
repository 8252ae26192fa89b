"""Features of models that some devices have no kernels for."""

from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.parameters import Parameters


def require_cpu(parameters: Parameters, feature: str) -> None:
    """Reject a GPU for a feature of the model, before any weight is read.

    Raises:
        ConfigError: the device is a GPU.
    """
    if parameters.device.type == "cuda":
        raise ConfigError(f"GPUs have no kernels for {feature}, which this model has", hint="run with --device cpu")


def check_recurrent(parameters: Parameters) -> None:
    """Reject layers with a recurrent state where they cannot run, before any weight is read.

    Raises:
        ConfigError: GPUs share the layer.
    """
    if parameters.group is not None and parameters.device.type == "cuda":
        raise ConfigError(
            "--tensor-parallel-size: GPUs cannot divide the states of recurrent layers",
            hint="use --pipeline-parallel-size or --data-parallel-size instead",
        )
