"""Computes the rows of pictures with a model's vision tower in this process, as callers may send them."""

from pathlib import Path
from typing import Any

import torch
import transformers

from octavo.frontend.model_files.facts import read_model_facts
from octavo.kernels.native import library
from octavo.protocol.buffers import Buffer
from octavo.protocol.config import EngineConfig, ModelConfig, resolve
from octavo.protocol.env import Env
from octavo.protocol.media import EncoderInput, MediaTensor, StepMedia
from octavo.worker_proc.media.open import open_encoder
from octavo.worker_proc.weights.load import load_model


@torch.inference_mode()
def rows_of_tower(path: Path, inputs: dict[str, Any], num_rows: int) -> torch.Tensor:
    """Return the rows of one item in float32.

    Args:
        path: path of the model.
        inputs: arrays that its processor makes of the item.
        num_rows: number of rows of the item.
    """
    model = ModelConfig(model=str(path), dtype="float32")
    config = resolve(EngineConfig(model=model), read_model_facts(model, Env.read()), device="cpu", num_cores=1)
    loaded = load_model(config, lambda fraction: None, library=library.load())
    encoder = open_encoder(loaded, config, None)
    assert encoder is not None
    tensors = {
        name: MediaTensor(array.dtype.name, list(array.shape), Buffer(array.tobytes()))
        for name, array in inputs.items()
    }
    digest = bytes(32)
    item = EncoderInput(digest, num_rows, tensors)
    ((_, _, rows_RD),) = encoder.rows_of_step(StepMedia([], [item], [(0, 0, num_rows, 0, 0)], [digest]))
    return rows_RD.float().clone()


def image_inputs(path: Path, picture: Any) -> dict[str, Any]:
    """Return what the image processor of a model makes of a picture."""
    processor = transformers.AutoImageProcessor.from_pretrained(path)
    return dict(processor(images=[picture], return_tensors="np"))
