"""Makes a model and fills it, whatever its weights come from."""

from collections.abc import Callable

import torch

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import NotEnoughMemoryError
from octavo.worker_proc.models.base import Model
from octavo.worker_proc.models.registry import build_model
from octavo.worker_proc.weights.dummy import fill_dummy
from octavo.worker_proc.weights.reader import read_weights

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def torch_dtype(config: ResolvedConfig) -> torch.dtype:
    """Return the type of weights, activations and cache."""
    return _DTYPES[config.dtype]


@torch.inference_mode()
def load_model(config: ResolvedConfig, report: Callable[[float], None]) -> Model:
    """Return the configured model with its weights.

    Args:
        config: model facts, dtype and the seed of dummy weights.
        report: called with the share of the weights read so far.

    Raises:
        ConfigError: the root cause: an architecture, file or tensor that is missing or not supported.
        NotEnoughMemoryError: the weights do not fit.
    """
    try:
        model = build_model(config.model, torch_dtype(config))
    except RuntimeError as error:  # what torch's allocator raises on the CPU
        raise NotEnoughMemoryError(
            f"the weights do not fit in memory: {error}",
            hint="use --dtype bfloat16 or a smaller model",
        ) from error
    if config.model.load_format == "dummy":
        fill_dummy(model.named_parameters(), config.seed)
    else:
        model.load_weights(read_weights(config.model, report))
    model.pack()
    return model
