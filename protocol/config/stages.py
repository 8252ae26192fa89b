"""Checks of the requested pipeline stages."""

from octavo.protocol.config.parallel import ParallelConfig
from octavo.protocol.errors import ConfigError


def resolve_stages(parallel: ParallelConfig, num_layers: int) -> list[int]:
    """Return the number of layers per stage as given by the user. Return an empty list if not given.

    Raises:
        ConfigError: the numbers do not fit the model's layers.
    """
    num_stages, text = parallel.pipeline_parallel_size, parallel.pipeline_layer_partition
    if num_stages > num_layers:
        raise ConfigError(
            f"pipeline_parallel_size {num_stages}: the model has {num_layers} layers",
            hint=f"use --pipeline-parallel-size {num_layers} or less",
        )
    if text is None:
        return []
    counts = [int(count) if count.strip().isdecimal() else 0 for count in text.split(",")]
    if min(counts) < 1 or len(counts) != num_stages or sum(counts) != num_layers:
        raise ConfigError(
            f"pipeline_layer_partition {text!r} is not {num_stages} positive numbers with the sum {num_layers}, "
            "the layers of the model",
            hint="give a number for each of --pipeline-parallel-size stages, such as 12,10",
        )
    return counts
