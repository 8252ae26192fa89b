"""Features of models that not all devices have kernels for, or that ranks cannot divide."""

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
        ConfigError: the device is a GPU, or ranks share the layer.
    """
    require_cpu(parameters, "recurrent layers")
    if parameters.group is not None:
        raise ConfigError(
            "--tensor-parallel-size: ranks cannot divide the states of recurrent layers",
            hint="use --pipeline-parallel-size or --data-parallel-size instead",
        )
