"""The audio encoder of Phi-4-multimodal: a conformer, whose results pass through one of two projectors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import (
    conv1d,
    conv2d,
    gelu,
    layer_norm,
    linear,
    pad,
    relu,
    scaled_dot_product_attention,
    silu,
)

from octavo.protocol.errors import ConfigError, ProtocolError
from octavo.protocol.media import BESIDE_IMAGES, MediaTensor
from octavo.worker_proc.models.audio.item_encoder import ItemEncoder, Upload
from octavo.worker_proc.models.checkpoint import renamed
from octavo.worker_proc.models.hf_config import CheckedConfig, ignore, optional, reject_unless
from octavo.worker_proc.models.parameters import Parameters
from octavo.worker_proc.models.vision.phi4 import EMBEDDING
from octavo.worker_proc.models.vision.tower import TowerSpec, array_of

FEATURES = "audio_input_features"
"""The tensor of an item: a spectrogram in float32, frames by mel bands."""
_WINDOW = 500
"""Rows that attend to each other; a longer audio clip has several windows, the last of which is filled with zeros."""
_FRAMES_AT_ONCE = 1024
"""Frames per call of the convolutions; a multiple of the frames of a row."""
_EPS = 1e-5
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 1536,
    "num_blocks": 24,
    "num_attention_heads": 16,
    "ext_pw_out_channel": 1024,
    "depthwise_separable_out_channel": 1024,
    "kernel_size": 3,
    "input_size": 80,
    "time_reduction": 8,
    "bias_max_distance": 1000,
    "bias_symmetric": False,
    "nemo_conv_channels": 1024,
}
"""Values that `transformers` leaves out of files."""


@dataclass(frozen=True, slots=True)
class ConformerConfig:
    """Sizes of the encoder."""

    width: int
    inner_width: int
    num_layers: int
    num_heads: int
    kernel_size: int
    num_mels: int
    num_halvings: int
    """Number of convolutions that halve the number of frames."""
    channels: int
    """Channels of these convolutions."""
    max_distance: int
    is_symmetric: bool
    """Whether the bias of scores depends on distances alone, not on their direction."""

    @classmethod
    def read(cls, section: Mapping[str, Any]) -> "ConformerConfig":
        """Read `audio_config`.

        Raises:
            ConfigError: a value is not supported.
        """
        config = CheckedConfig({**_DEFAULTS, **section}, "audio_config")
        ignore(config, "left_chunk", "dropout_rate", "feature_layer", "audio_token_id", "nemo_final_size")
        reject_unless(config, "chunk_size", [-1])
        reject_unless(config, "downsample_rate", [1])
        reject_unless(config, "depthwise_multiplier", [1])
        for key in ("activation", "conv_activation", "conv_glu_type"):
            reject_unless(config, key, ["swish", "silu", None])
        reject_unless(config, "nemo_activation", ["relu", None])
        for key in ("ext_pw_out_channel", "depthwise_separable_out_channel"):
            reject_unless(config, key, [config["hidden_size"]])
        reduction = config["time_reduction"]
        read = cls(
            width=config["hidden_size"],
            inner_width=config["intermediate_size"],
            num_layers=config["num_blocks"],
            num_heads=config["num_attention_heads"],
            kernel_size=config["kernel_size"],
            num_mels=config["input_size"],
            num_halvings=reduction.bit_length() - 1,
            channels=config["nemo_conv_channels"],
            max_distance=config["bias_max_distance"],
            is_symmetric=optional(config, "bias_symmetric", False),
        )
        config.reject_unread("an audio encoder")
        if reduction != 2**read.num_halvings or reduction < 2 or read.width % read.num_heads:
            raise ConfigError(
                f"config.json: 'audio_config' has a time_reduction of {reduction}, and {read.num_heads} heads of "
                f"{read.width} numbers; expected a power of 2, and heads of equal width"
            )
        return read

    @property
    def num_bands(self) -> int:
        """Number of bands of the spectrogram after the convolutions."""
        return self.num_mels + (1 << self.num_halvings) - 1 >> self.num_halvings

    def run_bytes(self, spec: TowerSpec) -> int:
        """Return the memory that encoding the longest audio clip takes."""
        convolved = self.channels * (_FRAMES_AT_ONCE // 2) * (self.num_mels // 2)
        scores = self.num_heads * _WINDOW**2
        rows = spec.max_item_tokens * (2 * self.width + 2 * spec.width + (self.num_mels << self.num_halvings))
        return torch.float32.itemsize * (2 * convolved + 3 * scores + rows)


class Phi4AudioEncoder(ItemEncoder):
    """The encoder with its projectors.

    Runs through torch in float32, one audio clip at a time, so that the bits of an audio clip depend on it alone. On a
    GPU the products are those of cuBLAS and cuDNN.

    Args:
        spec: what the model is built for.
        own: sizes of the encoder.
    """

    def __init__(self, spec: TowerSpec, own: ConformerConfig) -> None:
        super().__init__(
            Parameters(
                spec.placement,
                prefixes=[f"{outer}{EMBEDDING}audio_embed." for outer in ("", "model.")],
                ignored=[r"\bimage_embed\."],
                rules=[renamed({r"^encoder\.": ""})],
            ),
            own.run_bytes(spec),
        )
        self._own = own
        self._tensors = {
            name: self.parameters.new(name, *shape, dtype=torch.float32)
            for name, shape in _shapes(own, spec.width).items()
        }

    def encode(self, tensors: Mapping[str, MediaTensor], upload: Upload) -> Tensor:
        """See `ItemEncoder.encode`.

        Raises:
            ProtocolError: these are not the tensors of one audio clip.
        """
        (frames_FC, *others) = array_of(tensors, FEATURES, np.float32, 3)
        if others or not len(frames_FC) or frames_FC.shape[1] != self._own.num_mels:
            raise ProtocolError(f"{FEATURES} of shape {(1 + len(others), *frames_FC.shape)}")
        rows_TD = self._subsampled(upload(frames_FC.copy()))
        windows = list(rows_TD.split(_WINDOW))
        if len(windows) > 1:
            windows[-1] = pad(windows[-1], (0, 0, 0, _WINDOW - len(windows[-1])))
        encoded_TD = torch.cat([self._encoded(window_WD) for window_WD in windows])[: len(rows_TD)]
        mode = "vision_speech" if BESIDE_IMAGES in tensors else "speech"
        inner_TD = gelu(self._linear(f"up_proj_for_{mode}", encoded_TD))
        return self._linear(f"down_proj_for_{mode}", inner_TD)

    def _subsampled(self, frames_FC: Tensor) -> Tensor:
        """Return the convolved frames, one row per `2 ** num_halvings` frames."""
        frames_FC = (frames_FC - self._tensors["encoder_embedding.global_mean"]) * self._tensors[
            "encoder_embedding.global_invstd"
        ]
        per_row = 1 << self._own.num_halvings
        parts = []
        # In pieces: the convolutions of a long audio clip would take gigabytes.
        for start in range(0, len(frames_FC), _FRAMES_AT_ONCE):
            seen_before = per_row if start else 0  # a row depends on frames of the previous row, but not on later ones
            x = frames_FC[start - seen_before : start + _FRAMES_AT_ONCE][None]
            for index in range(self._own.num_halvings):
                x = self._halved(x, index)
            parts.append(x.transpose(0, 1).flatten(1)[1 if start else 0 :])
        return self._linear("embed.out", torch.cat(parts))

    def _halved(self, x: Tensor, index: int) -> Tensor:
        """Return half as many frames and bands, shape (channels, frames, bands)."""
        tensors, place = self._tensors, max(0, 3 * index - 1)
        name = f"embed.conv.{place}"
        x = conv2d(
            x, tensors[f"{name}.weight"], tensors[f"{name}.bias"], stride=2, padding=1, groups=len(x) if index else 1
        )
        if index:
            name = f"embed.conv.{place + 1}"
            x = conv2d(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])
        return relu(x)

    def _encoded(self, x_TD: Tensor) -> Tensor:
        """Return the results of all layers for rows that attend to each other."""
        places_T = torch.arange(len(x_TD), device=x_TD.device)
        most = self._own.max_distance
        distances_TT = (places_T - places_T[:, None]).clamp(-most, most - 1)
        buckets_TT = distances_TT.abs() if self._own.is_symmetric else distances_TT + most
        bias_NTT = self._tensors["relative_attention_bias_layer.bias_values.weight"][buckets_TT].permute(2, 0, 1)
        bias_NTT = bias_NTT.contiguous()
        for index in range(self._own.num_layers):
            name = f"encoders.{index}"
            x_TD = x_TD + 0.5 * self._fed_forward(f"{name}.feed_forward_in", x_TD)
            x_TD = x_TD + self._attended(f"{name}.self_attn", self._normed(f"{name}.layer_norm_att", x_TD), bias_NTT)
            x_TD = x_TD + self._convolved(f"{name}.conv", x_TD)
            x_TD = x_TD + 0.5 * self._fed_forward(f"{name}.feed_forward_out", x_TD)
            x_TD = self._normed(f"{name}.layer_norm", x_TD)
        return x_TD

    def _fed_forward(self, name: str, x_TD: Tensor) -> Tensor:
        up_TF, gate_TF = self._linear(f"{name}.gate_up_proj", self._normed(f"{name}.layer_norm", x_TD)).chunk(2, dim=1)
        return self._linear(f"{name}.down_proj", up_TF * silu(gate_TF))

    def _attended(self, name: str, x_TD: Tensor, bias_NTT: Tensor) -> Tensor:
        q_NTH, k_NTH, v_NTH = (
            self._linear(f"{name}.{part}_proj", x_TD).unflatten(1, (self._own.num_heads, -1)).transpose(0, 1)
            for part in "qkv"
        )
        attended_NTH = scaled_dot_product_attention(q_NTH, k_NTH, v_NTH, attn_mask=bias_NTT)
        return self._linear(f"{name}.o_proj", attended_NTH.transpose(0, 1).flatten(1))

    def _convolved(self, name: str, x_TD: Tensor) -> Tensor:
        tensors = self._tensors
        first_TD, second_TD = self._linear(
            f"{name}.glu.ext_pw_conv_1d", self._normed(f"{name}.layer_norm", x_TD)
        ).chunk(2, dim=1)
        gated_TD = (first_TD + tensors[f"{name}.glu.b1"].flatten()) * silu(
            second_TD + tensors[f"{name}.glu.b2"].flatten()
        )
        conv = f"{name}.dw_sep_conv_1d.dw_conv"
        before = pad(gated_TD.T, (self._own.kernel_size - 1, 0))
        mixed_DT = conv1d(before, tensors[f"{conv}.weight"], tensors[f"{conv}.bias"], groups=self._own.width)
        activated_TD = silu(self._linear(f"{name}.dw_sep_conv_1d.pw_conv", mixed_DT.T))
        return self._linear(f"{name}.ext_pw_conv_1d", activated_TD)

    def _normed(self, name: str, x_TD: Tensor) -> Tensor:
        return layer_norm(x_TD, x_TD.shape[1:], self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"], _EPS)

    def _linear(self, name: str, x_TI: Tensor) -> Tensor:
        """Return the output of a linear layer, or of a convolution over single rows."""
        return linear(x_TI, self._tensors[f"{name}.weight"].flatten(1), self._tensors[f"{name}.bias"])


def _shapes(own: ConformerConfig, width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors, by their names in a checkpoint without prefix.

    Args:
        own: sizes of the encoder.
        width: width of prompt rows.
    """
    size, channels = own.width, own.channels
    weights: dict[str, tuple[int, ...]] = {"embed.conv.0": (channels, 1, 3, 3)}
    for index in range(1, own.num_halvings):
        weights[f"embed.conv.{3 * index - 1}"] = channels, 1, 3, 3
        weights[f"embed.conv.{3 * index}"] = channels, channels, 1, 1
    weights["embed.out"] = size, channels * own.num_bands
    for mode in ("speech", "vision_speech"):
        weights |= {f"up_proj_for_{mode}": (width, size), f"down_proj_for_{mode}": (width, width)}
    others: dict[str, tuple[int, ...]] = {
        "encoder_embedding.global_mean": (own.num_mels,),
        "encoder_embedding.global_invstd": (own.num_mels,),
        "relative_attention_bias_layer.bias_values.weight": (
            own.max_distance * (1 if own.is_symmetric else 2),
            own.num_heads,
        ),
    }
    for index in range(own.num_layers):
        name = f"encoders.{index}"
        for part in ("in", "out"):
            weights[f"{name}.feed_forward_{part}.gate_up_proj"] = 2 * own.inner_width, size
            weights[f"{name}.feed_forward_{part}.down_proj"] = size, own.inner_width
        weights |= {f"{name}.self_attn.{part}_proj": (size, size) for part in "qkvo"}
        weights |= {
            f"{name}.conv.glu.ext_pw_conv_1d": (2 * size, size, 1),
            f"{name}.conv.dw_sep_conv_1d.dw_conv": (size, 1, own.kernel_size),
            f"{name}.conv.dw_sep_conv_1d.pw_conv": (size, size, 1),
            f"{name}.conv.ext_pw_conv_1d": (size, size, 1),
        }
        norms = ("feed_forward_in.layer_norm", "feed_forward_out.layer_norm", "conv.layer_norm", "layer_norm_att")
        weights |= {f"{name}.{norm}": (size,) for norm in (*norms, "layer_norm")}
        others |= {f"{name}.conv.glu.{part}": (1, size, 1) for part in ("b1", "b2")}
    tensors = {f"{name}.weight": shape for name, shape in weights.items()}
    tensors |= {f"{name}.bias": shape[:1] for name, shape in weights.items()}
    return {**tensors, **others}


def build(spec: TowerSpec) -> Phi4AudioEncoder:
    """Make the encoder; its parameters are uninitialized.

    Raises:
        ConfigError: something in the configuration is not supported.
    """
    return Phi4AudioEncoder(spec, ConformerConfig.read(spec.facts.hf_config.get("audio_config") or {}))
