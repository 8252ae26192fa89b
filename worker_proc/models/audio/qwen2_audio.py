"""Qwen2-Audio: the means of two results of Whisper's encoder, each through a linear layer, are rows of the prompt."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from octavo.kernels.add import add
from octavo.kernels.pointwise import scale
from octavo.protocol.errors import ProtocolError
from octavo.protocol.media import MediaTensor
from octavo.worker_proc.models.audio.whisper import (
    EPS,
    FEATURES,
    EncoderSizes,
    WhisperEncoder,
    assemble,
    whisper_rules,
)
from octavo.worker_proc.models.checkpoint import renamed
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore
from octavo.worker_proc.models.layers.linear import Linear
from octavo.worker_proc.models.layers.norm import LayerNorm
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.vision.tower import MergedProjection, Patches, TowerSpec, array_of

MASK = "feature_attention_mask"
"""The tensor of an item that counts the frames of its audio clip: int64, ones."""
PREFIXES = [f"{outer}{inner}." for outer in ("", "model.") for inner in ("audio_tower", "multi_modal_projector")]
READ_ELSEWHERE = (
    *("text_config", "audio_config", "audio_token_index", "audio_token_id", "tie_word_embeddings"),
    *("ignore_index", "hidden_size", "vocab_size"),
)
_DEFAULTS = {
    "d_model": 1280,
    "encoder_ffn_dim": 5120,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "max_source_positions": 1500,
    "num_mel_bins": 128,
}
"""Values that `transformers` leaves out of `audio_config`."""
_NUM_MERGED = 2


class Qwen2AudioTower(WhisperEncoder):
    """The encoder with its projector."""

    def patches(self, tensors: Mapping[str, MediaTensor]) -> list[Patches]:
        """See `MediaTower.patches`: rows after the end of the audio clip are left out, as a mask would.

        Raises:
            ProtocolError: these are not the tensors of one audio clip.
        """
        (frames_CF, *others) = array_of(tensors, FEATURES, np.float32, 3)
        num_frames = int(array_of(tensors, MASK, np.int64, 2).sum())
        num_rows = num_encoded(num_frames)
        if others or len(frames_CF) != self.num_mels or not 0 < num_rows <= self.max_item_rows:
            raise ProtocolError(f"{FEATURES} of {1 + len(others)} x {frames_CF.shape} with {num_frames} frames")
        if num_encoded(frames_CF.shape[1]) < num_rows:
            raise ProtocolError(f"{FEATURES} of shape {frames_CF.shape} has fewer than {num_frames} frames")
        positions_T = np.arange(num_rows)
        return [Patches(frames_CF, positions_T, positions_T[: num_rows // _NUM_MERGED * _NUM_MERGED])]


def num_encoded(num_frames: int) -> int:
    """Return how many rows the convolutions make of the frames of an audio clip."""
    return (num_frames + 1) // 2


def read_sizes(section: Mapping[str, Any], architecture: str) -> EncoderSizes:
    """Return the sizes that `audio_config` gives.

    Args:
        section: section that uses Whisper's names.
        architecture: architecture of the model, for errors.

    Raises:
        ConfigError: a value is not supported.
    """
    audio = CheckedConfig({**_DEFAULTS, **section}, "audio_config")
    ignore(audio, "encoder_layerdrop")  # of training
    sizes = EncoderSizes.read(audio)
    audio.reject_unread(architecture)
    return sizes


def build(spec: TowerSpec) -> Qwen2AudioTower:
    """Make the encoder; its parameters are uninitialized.

    Raises:
        ConfigError: something in the configuration is not supported.
    """
    config = CheckedConfig(spec.facts.hf_config)
    ignore(config, *READ_ELSEWHERE)
    sizes = read_sizes(config["audio_config"], spec.facts.architecture)
    config.reject_unread(spec.facts.architecture)
    rules = [*whisper_rules(), renamed({r"^linear\.": "projector."})]
    parameters = Parameters(spec.placement, prefixes=PREFIXES, rules=rules)
    norm = LayerNorm.new(parameters, "layer_norm", sizes.width, EPS)
    projector = Linear.new(parameters, "projector", sizes.width, spec.width, bias=True)
    return assemble(
        Qwen2AudioTower,
        spec,
        sizes,
        parameters,
        project=lambda rows: scale(rows, 1 / _NUM_MERGED),
        merged=MergedProjection(_NUM_MERGED, _mean_projector(norm, projector, sizes.width)),
    )


def _mean_projector(norm: LayerNorm, projector: Linear, width: int) -> Callable[[Tensor], Tensor]:
    """Return a function that makes a row from two halves of results."""

    def project(halves: Tensor) -> Tensor:
        first, second = halves.split([width] * _NUM_MERGED, dim=1)
        return projector(norm(add(first, second)))

    return project
